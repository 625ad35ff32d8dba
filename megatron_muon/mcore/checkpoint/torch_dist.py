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

import torch

from megatron_muon.mcore.checkpoint.read import ReadError, Unknown, load, load_pickle
from megatron_muon.mcore.load_check.regular_files import NotRegularError, open_regular

METADATA = ".metadata"
# Everything that is not sharded: a file of its own, from core 0.19 an object among the tensors.
COMMON_FILE, COMMON_KEY = "common.pt", re.compile(r"common_state/shard_")
Numbers = tuple[int, ...]


class Chunk(NamedTuple):
    """A slice of a tensor, in elements."""

    offsets: Numbers
    sizes: Numbers


class Tensor(NamedTuple):
    """A whole tensor, as the metadata describe it."""

    size: Numbers
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


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
        entries: the tensor of each key; None for a key of another object.
        places: the place by key and, for a slice of a tensor, its offsets.
    """

    folder: Path
    entries: Mapping[str, Tensor | None]
    places: Mapping[tuple[str, Numbers | None], FileRange]

    def value(self, key: str, offsets: Numbers | None = None) -> Any:
        """The saved value of a key: an object or, at ``offsets``, a tensor's slice.

        Raises:
            KeyError: the metadata have no place for it.
            OSError: the file cannot be read.
            ReadError: it is damaged.
        """
        place = self.places[key, offsets]
        try:
            with open_regular(self.folder / place.file) as file:
                file.seek(place.offset)
                data = file.read(place.length)
        except NotRegularError:
            raise ReadError("it is no regular file") from None
        if len(data) < place.length:
            raise ReadError(f"it ends {place.length - len(data)} bytes too early")
        return load(data)

    def object(self, key: str) -> Any:
        """The value of Megatron's ShardedObject; raises as ``value`` does."""
        value = self.value(key)
        if isinstance(value, Unknown) and value.named == ("_io", "BytesIO"):
            data = value.state[0] if isinstance(value.state, tuple) and value.state else None
            if not isinstance(data, bytes):
                raise ReadError("a BytesIO in it is damaged")
            value = load(data)
        return value[0] if isinstance(value, list) and len(value) == 1 else value


def read_metadata(folder: Path) -> Metadata:
    """The contents of ``.metadata``.

    Raises:
        OSError: it cannot be read, or is not there.
        ReadError: it is damaged, or not torch's.
    """
    saved = load_pickle(folder / METADATA)
    try:
        state = _state(saved, "Metadata")
        entries = {
            _checked(str, key): _entry(entry) for key, entry in state["state_dict_metadata"].items()
        }
        places = dict(_place(*item) for item in state["storage_data"].items())
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ReadError(f"it is not what torch writes: {type(error).__name__}: {error}") from None
    return Metadata(folder, entries, places)


def _state(value: Any, name: str) -> dict[str, Any]:
    """The attributes of an object of one of torch's classes."""
    if isinstance(value, Unknown) and value.named[1] == name:
        return _checked(dict, value.state)  # type: ignore[no-any-return]
    raise ReadError(f"it has {type(value).__name__[:100]!r} where a {name} of torch should be")


def _checked(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ReadError(f"it has a {type(value).__name__[:100]} in place of a {kind.__name__}")
    return value


def _numbers(value: Any) -> Numbers:
    if isinstance(value, (list, tuple)) and all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        return tuple(value)
    raise ReadError("a size or an offset is no tuple of numbers")


def _entry(entry: Any) -> Tensor | None:
    if isinstance(entry, Unknown) and entry.named[1] == "BytesStorageMetadata":
        return None
    state = _state(entry, "TensorStorageMetadata")
    properties = state["properties"].state  # a dict, or in older torch a tuple
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    chunks = (_state(chunk, "ChunkStorageMetadata") for chunk in _checked(list, state["chunks"]))
    return Tensor(
        _numbers(state["size"]),
        _checked(torch.dtype, dtype),
        tuple(Chunk(_numbers(chunk["offsets"]), _numbers(chunk["sizes"])) for chunk in chunks),
    )


def _place(index: Any, info: Any) -> tuple[tuple[str, Numbers | None], FileRange]:
    where, state = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
    offset = where.get("offset")
    key = _checked(str, where["fqn"]), None if offset is None else _numbers(offset)
    file = _checked(str, state["relative_path"])
    if Path(file).name != file or file in ("", "..") or "\0" in file:  # only in the folder
        raise ReadError(f"it places {key[0]!r} in {file!r}, which is no name of a file")
    if state.get("transform_descriptors"):
        raise ReadError(f"{key[0]!r} is compressed, which is not read here")
    return key, FileRange(file, *_numbers((state["offset"], state["length"])))


def common(metadata: Metadata) -> dict[Any, Any]:
    """The values that are the same on all ranks: groups and arguments.

    Raises:
        OSError: the file cannot be read, or there is none.
        ValueError: it is damaged, or no dict.
    """
    file = metadata.folder / COMMON_FILE
    key = next((key for key in metadata.entries if COMMON_KEY.match(key)), None)
    value = load(file) if key is None or file.exists() else metadata.object(key)
    return _checked(dict, value)  # type: ignore[no-any-return]
