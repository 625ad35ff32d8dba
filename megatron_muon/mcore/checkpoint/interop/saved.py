"""Who wrote a checkpoint, and what it says of its optimizer; no communication.

Pickles are read as data: of the classes and functions that a file names only the few
that Megatron's and torch's own files need are called. (Megatron reads the same files
next, and trusts them.)
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_muon.mcore.checkpoint.buffers import RECORD, groups_of, states_of
from megatron_muon.mcore.checkpoint.interop import foreign

METADATA = ".metadata"  # of torch_dist
# Everything that is not sharded: a file of its own, from core 0.19 an object among the
# tensors.
_COMMON_FILE, _COMMON_KEY = "common.pt", re.compile(r"common_state/shard_")
_OPTIMIZERS = re.compile(r"(chained_\d+\.)*optimizer\.")


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint's files say of its optimizer."""

    folder: Path  # the folder of one iteration
    metadata: Metadata  # torch's of torch_dist; empty in other formats
    # of a chain of optimizers, without what differs between ranks
    states: list[dict[Any, Any]]

    @classmethod
    def of(cls, folder: str | Path) -> Saved:
        """Read a folder: FileNotFoundError without a checkpoint, ValueError if it is
        damaged.
        """
        folder = Path(folder)
        if not (folder / METADATA).exists():
            files = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
            if not files:
                raise FileNotFoundError(f"{folder} has no checkpoint in it")
            return cls(folder, Metadata({}), _states_in(files[0]))
        with _naming(folder / METADATA) as file:
            saved = cls(folder, _Data(io.BytesIO(file.read_bytes())).load(), [])
            key = next(filter(_COMMON_KEY.match, saved.keys), None)
        if key is None or (folder / _COMMON_FILE).exists():
            return replace(saved, states=_states_in(folder / _COMMON_FILE))
        with _naming(folder / METADATA):
            return replace(saved, states=_states_of(saved.object(key)))

    @property
    def keys(self) -> list[str]:
        """Keys of all tensors and objects in torch_dist."""
        return list(self.metadata.state_dict_metadata)

    @property
    def writer(self) -> Literal["muon", "adamw", "none"]:
        """The optimizer whose state it has: this package's Muon, AdamW or another, or
        none.
        """
        if self.has():
            return "muon"
        return "adamw" if self.states or self._of_optimizers() else "none"

    @property
    def is_megatrons(self) -> bool:
        """Whether Megatron's own Muon has written it: see ``foreign``."""
        states = self.states
        if self._objects("optimizer"):  # the groups of each model-parallel rank
            states = [*states, {"optimizer": self.record("optimizer")}]
        files = [path.name for path in self.folder.rglob("*.pt")]
        return foreign.is_megatrons(self._of_optimizers(), states, files)

    def has(self, key: str = RECORD) -> bool:
        """Whether there is a ``record`` under this key."""
        return any(key in state for state in self.states) or bool(self._objects(key))

    def record(self, key: str = RECORD) -> dict[str, Any]:
        """The dict saved under a key beside the optimizer's groups; else a KeyError.

        Raises:
            ValueError: it is no dict.
        """
        found = [state[key] for state in self.states if key in state]
        found = found or [self.object(name) for name in self._objects(key)[:1]]
        if not found:
            raise KeyError(f"{self.folder} has no {key}")
        if not isinstance(found[0], dict):
            raise ValueError(f"{self.folder}: its record {key} is damaged")
        return found[0]

    def settings(self, key: str = RECORD, name: str = "settings") -> dict[str, Any]:
        """Muon's settings in a record; ValueError where it has none."""
        settings = self.record(key).get(name)
        if not isinstance(settings, dict):
            raise ValueError(f"{self.folder}: its record {key} is damaged")
        return settings

    def require_plain_groups(self) -> None:
        """Refuse, by a ValueError, groups with objects of a class that is not read
        here.
        """
        for group in groups_of(self.states):
            for key, value in group.items():
                if isinstance(value, _Unknown):
                    what = type(value).__name__
                    raise ValueError(
                        f"{self.folder}: a group's {key} is of a class, {what}"
                    )

    def object(self, key: str) -> Any:
        """The value of Megatron's ShardedObject; ValueError where its file is
        damaged.
        """
        with _naming(self.folder / METADATA):
            place = self.metadata.storage_data[MetadataIndex(key)]
            where = self.folder / place.relative_path
        with _naming(where) as path, path.open("rb") as file:
            file.seek(place.offset)
            value = _loaded(io.BytesIO(file.read(place.length)))
            if isinstance(value, io.BytesIO):
                value = _loaded(value)
        return value[0] if isinstance(value, list) and len(value) == 1 else value

    def _of_optimizers(self) -> list[str]:
        return [key for key in self.keys if _OPTIMIZERS.match(key)]

    def _objects(self, key: str) -> list[str]:
        """Keys of the objects that model-parallel ranks have saved under this one."""
        return [name for name in self._of_optimizers() if f".{key}/" in name]


def _states_in(file: Path) -> list[dict[Any, Any]]:
    with _naming(file):
        return _states_of(_loaded(str(file), mmap=True))


def _states_of(common: Any) -> list[dict[Any, Any]]:
    """The optimizers' state dicts in what is not sharded; TypeError where their groups
    are no dicts.
    """
    states = states_of(common.get("optimizer"))
    for group in groups_of(states):
        if not isinstance(group, dict):
            raise TypeError(f"a parameter group is no dict but {group!r}")
    return states


@contextmanager
def _naming(file: Path) -> Iterator[Path]:
    """Add the file's path to errors about its damaged content."""
    try:
        yield file
    except OSError:
        raise
    except Exception as error:  # there is no list of what a damaged file raises
        raise ValueError(
            f"{file} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _loaded(file: Any, **options: Any) -> Any:
    """What ``torch.save`` has written, by ``_Data``."""
    if "constants.pkl" in torch._C.PyTorchFileReader(file).get_all_records():
        raise ValueError("it is a TorchScript archive, which is code")
    if not isinstance(file, str):
        file.seek(0)
    reading: Any = SimpleNamespace(__name__="pickle", Unpickler=_Data)
    options |= {"map_location": "cpu", "pickle_module": reading, "weights_only": False}
    return torch.load(file, **options)


class _Unknown:
    """An object of a class, or a result of a function, that is not known; it holds
    nothing.
    """

    def __new__(cls, *_: Any, **__: Any) -> _Unknown:
        return object.__new__(cls)

    def ignore(self, *_: Any, **__: Any) -> Any:
        return self

    __call__ = __setstate__ = __setitem__ = append = extend = add = ignore


class _Data(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module  # in protocol 2
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype) or name in _KNOWN.get(module, ()):
            found = super().find_class(module, name)
            if isinstance(found, FunctionType):
                return lambda *args: found(*args)  # a file may set its attributes
            return _closed(found) if isinstance(found, type) else found
        return type(name, (_Unknown,), {})


class _Closed(type):
    """The type of classes whose attributes no file can set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets the attribute {name} of {cls.__name__}")


def _closed(found: type) -> type:
    """A class that makes objects of a class of Python code, and cannot be changed."""
    if not found.__flags__ & _IS_CHANGEABLE:
        return found

    def new(_: type, *args: Any) -> Any:
        return found(*args) if args else object.__new__(found)

    # torch reads it of a storage
    members = {"__new__": new, "dtype": torch.uint8}
    return _Closed(found.__name__, (), members)


_IS_CHANGEABLE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


# What the files of torch and Megatron need, by module.
_KNOWN = {
    "builtins": ("bytearray", "complex", "dict", "frozenset", "list", "set"),
    "_codecs": ("encode",),
    "argparse": ("Namespace",),
    "collections": ("OrderedDict", "defaultdict"),
    "_io": ("BytesIO",),
    "torch": ("Size",),
    "torch.storage": ("UntypedStorage",),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
    ),
}
