"""A reader of a ``torch_dist`` checkpoint's metadata and objects as data, without Megatron.

``torch.distributed.checkpoint`` reads ``.metadata`` by ``pickle.load`` and objects by
``torch.load(weights_only=False)``: both run whatever code a file names. Here ``read`` does.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` at torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_muon.mcore.checkpoint.read import ReadError, Unknown, load, load_pickle
from megatron_muon.mcore.load_check.regular_files import NotRegularError, open_regular

METADATA = ".metadata"
# Everything that is not sharded: a file of its own, from core 0.19 an object among the tensors.
COMMON_FILE, COMMON_KEY = "common.pt", re.compile(r"common_state/shard_")
Numbers = tuple[int, ...]


class FileRange(NamedTuple):
    """The place of a saved value: bytes ``[offset, offset + length)`` of a file of the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """The contents of a checkpoint's metadata.

    Attributes:
        folder: the checkpoint's folder.
        entries: what torch says of the tensor or object of each key: an ``Unknown`` of its class.
        places: the place by key and, for a slice of a tensor, its offsets.
    """

    folder: Path
    entries: Mapping[str, Unknown]
    places: Mapping[tuple[str, Numbers | None], FileRange]

    def object(self, key: str) -> Any:
        """The value of Megatron's ShardedObject.

        Raises:
            KeyError: the metadata have no place for it.
            OSError: the file cannot be read.
            ReadError: it is damaged.
        """
        place = self.places[key, None]
        try:
            with open_regular(self.folder / place.file) as file:
                file.seek(place.offset)
                data = file.read(place.length)
        except NotRegularError:
            raise ReadError("it is no regular file") from None
        if len(data) < place.length:
            raise ReadError(f"it ends {place.length - len(data)} bytes too early")
        value = load(data)
        if isinstance(value, Unknown) and value.named == ("_io", "BytesIO"):
            inner = value.state[0] if isinstance(value.state, tuple) and value.state else None
            if not isinstance(inner, bytes):
                raise ReadError("a BytesIO in it is damaged")
            value = load(inner)
        return value[0] if isinstance(value, list) and len(value) == 1 else value


def read_metadata(folder: Path) -> Metadata:
    """The contents of ``.metadata``.

    Raises:
        OSError: it cannot be read, or is not there.
        ReadError: it is damaged, or not torch's.
    """
    saved = load_pickle(folder / METADATA)
    try:
        state = state_of(saved, "Metadata")
        entries = {
            checked(str, key): checked(Unknown, entry)
            for key, entry in state["state_dict_metadata"].items()
        }
        places = dict(_place(*item) for item in state["storage_data"].items())
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ReadError(f"it is not what torch writes: {type(error).__name__}: {error}") from None
    return Metadata(folder, entries, places)


def state_of(value: Any, name: str) -> dict[str, Any]:
    """The attributes of an object of one of torch's classes."""
    if isinstance(value, Unknown) and value.named[1] == name:
        return checked(dict, value.state)  # type: ignore[no-any-return]
    raise ReadError(f"it has {type(value).__name__[:100]!r} where a {name} of torch should be")


def checked(kind: type, value: Any) -> Any:
    """The value, if it is of that kind; else ReadError."""
    if not isinstance(value, kind):
        raise ReadError(f"it has a {type(value).__name__[:100]} in place of a {kind.__name__}")
    return value


def numbers(value: Any) -> Numbers:
    """A size or offsets; ReadError for anything else."""
    if isinstance(value, (list, tuple)) and all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        return tuple(value)
    raise ReadError("a size or an offset is no tuple of numbers")


def _place(index: Any, info: Any) -> tuple[tuple[str, Numbers | None], FileRange]:
    where, state = state_of(index, "MetadataIndex"), state_of(info, "_StorageInfo")
    offset = where.get("offset")
    key = checked(str, where["fqn"]), None if offset is None else numbers(offset)
    file = checked(str, state["relative_path"])
    if Path(file).name != file or file in ("", "..") or "\0" in file:  # only in the folder
        raise ReadError(f"it places {key[0]!r} in {file!r}, which is no name of a file")
    if state.get("transform_descriptors"):
        raise ReadError(f"{key[0]!r} is compressed, which is not read here")
    return key, FileRange(file, *numbers((state["offset"], state["length"])))


def common(metadata: Metadata) -> dict[Any, Any]:
    """The values that are the same on all ranks: groups and arguments.

    Raises:
        OSError: the file cannot be read, or there is none.
        ValueError: it is damaged, or no dict.
    """
    file = metadata.folder / COMMON_FILE
    key = next((key for key in metadata.entries if COMMON_KEY.match(key)), None)
    value = load(file) if key is None or file.exists() else metadata.object(key)
    return checked(dict, value)  # type: ignore[no-any-return]
