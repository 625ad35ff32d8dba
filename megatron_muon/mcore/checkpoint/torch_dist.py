"""A reader of a ``torch_dist`` checkpoint's metadata and objects as data, without Megatron.

``torch.distributed.checkpoint`` reads ``.metadata`` by ``pickle.load`` and objects by
``torch.load(weights_only=False)``: both run whatever code a file names. Here ``read`` does.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` at torch 2.13.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_muon.mcore.checkpoint.read import ReadError, Unknown, load, load_pickle
from megatron_muon.mcore.load_check.files import NotRegularError, open_regular

METADATA = ".metadata"
# Everything that is not sharded: a file of its own, from core 0.19 an object among the tensors.
COMMON_FILE, COMMON_KEY = "common.pt", re.compile(r"common_state/shard_")


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
        keys: of all tensors and objects.
        places: the place of each object, by its key.
    """

    folder: Path
    keys: tuple[str, ...] = ()
    places: Mapping[str, FileRange] = field(default_factory=dict)

    def object(self, key: str) -> Any:
        """The value of Megatron's ShardedObject.

        Raises:
            KeyError: the metadata have no place for it.
            OSError: the file cannot be read.
            ReadError: it is damaged.
        """
        place = self.places[key]
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
        state = _state_of(saved, "Metadata")
        keys = tuple(_checked(str, key) for key in state["state_dict_metadata"].keys())
        places = dict(filter(None, itertools.starmap(_place, state["storage_data"].items())))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ReadError(f"it is not what torch writes: {type(error).__name__}: {error}") from None
    return Metadata(folder, keys, places)


def _state_of(value: Any, name: str) -> dict[str, Any]:
    """The attributes of an object of one of torch's classes."""
    if isinstance(value, Unknown) and value.named[1] == name:
        return _checked(dict, value.state)  # type: ignore[no-any-return]
    raise ReadError(f"it has {type(value).__name__[:100]!r} where a {name} of torch should be")


def _checked(kind: type, value: Any) -> Any:
    """The value, if it is of that kind; else ReadError."""
    if not isinstance(value, kind):
        raise ReadError(f"it has a {type(value).__name__[:100]} in place of a {kind.__name__}")
    return value


def _place(index: Any, info: Any) -> tuple[str, FileRange] | None:
    """The key and place of an object; None for a tensor."""
    where, state = _state_of(index, "MetadataIndex"), _state_of(info, "_StorageInfo")
    if where.get("offset") is not None:
        return None
    key, file = _checked(str, where["fqn"]), _checked(str, state["relative_path"])
    if Path(file).name != file or file in ("", "..") or "\0" in file:  # only in the folder
        raise ReadError(f"it places {key!r} in {file!r}, which is no name of a file")
    if state.get("transform_descriptors"):
        raise ReadError(f"{key!r} is compressed, which is not read here")
    both = state["offset"], state["length"]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in both):
        raise ReadError(f"the place of {key!r} is no pair of numbers")
    return key, FileRange(file, *both)


def common(metadata: Metadata) -> dict[Any, Any]:
    """The values that are the same on all ranks: groups and arguments.

    Raises:
        OSError: the file cannot be read, or there is none.
        ValueError: it is damaged, or no dict.
    """
    file = metadata.folder / COMMON_FILE
    key = next((key for key in metadata.keys if COMMON_KEY.match(key)), None)
    value = load(file) if key is None or file.exists() else metadata.object(key)
    return _checked(dict, value)  # type: ignore[no-any-return]
