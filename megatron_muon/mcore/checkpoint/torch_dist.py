"""A reader of a ``torch_dist`` checkpoint's metadata and objects as data, without Megatron.

``torch.distributed.checkpoint`` reads ``.metadata`` by ``pickle.load`` and objects by
``torch.load(weights_only=False)``: both run whatever code a file names. Here ``read`` does, and
every value is checked.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` at torch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_muon.mcore.checkpoint.read import (
    ReadError,
    Unknown,
    load,
    load_pickle,
    load_view,
    mapped,
)

METADATA = ".metadata"
# Everything that is not sharded: a file of its own, from core 0.19 an object among the tensors.
COMMON_FILE, COMMON_KEY = "common.pt", re.compile(r"common_state/shard_")
_MODULE = "torch.distributed.checkpoint.metadata"
Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a tensor, in elements."""

    offsets: Numbers
    sizes: Numbers


@dataclass(frozen=True, slots=True)
class Tensor:
    """A whole tensor, as the metadata describe it."""

    size: Numbers
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class FileRange:
    """The place of a saved value: bytes ``[offset, offset + length)`` of a file of the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """The contents of a checkpoint's metadata.

    Attributes:
        entries: the tensor of each key; None for a key of another object.
        places: the place by key and, for a piece of a tensor, its offsets.
    """

    entries: Mapping[str, Tensor | None]
    places: Mapping[tuple[str, Numbers | None], FileRange]


def read_metadata(folder: Path) -> Metadata:
    """The contents of ``.metadata``.

    Raises:
        OSError: it cannot be read, or is not there.
        ReadError: it is damaged, or not torch's.
    """
    state = _state(load_pickle(folder / METADATA), "Metadata")
    entries = {
        _text(key): _entry(entry) for key, entry in _dict(state, "state_dict_metadata").items()
    }
    places = dict(_place(*item) for item in _dict(state, "storage_data").items())
    return Metadata(entries, places)


# --- what is in it -------------------------------------------------------------------------------


def _state(value: Any, name: str) -> Mapping[str, Any]:
    """The attributes of an object of one of torch's classes."""
    own = isinstance(value, Unknown) and value.named[1] == name
    if own and isinstance(value.state, dict):
        return value.state
    raise ReadError(f"it has {_kind(value)} where a {name} of torch should be")


def _kind(value: Any) -> str:
    return repr(value)[:200] if isinstance(value, Unknown) else f"a {type(value).__name__}"


def _dict(state: Mapping[str, Any], name: str) -> dict[Any, Any]:
    value = state.get(name)
    if not isinstance(value, dict):
        raise ReadError(f"its {name} is {_kind(value)}, not a dict")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ReadError(f"a key is {_kind(value)}, not a text")
    return value


def _numbers(value: Any) -> Numbers:
    if isinstance(value, (list, tuple)) and all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        return tuple(value)
    raise ReadError("a size or an offset is no tuple of numbers")


def _entry(entry: Any) -> Tensor | None:
    if isinstance(entry, Unknown) and entry.named == (_MODULE, "BytesStorageMetadata"):
        return None
    state = _state(entry, "TensorStorageMetadata")
    chunks = state.get("chunks")
    if not isinstance(chunks, (list, tuple)):
        raise ReadError(f"a tensor's chunks are {_kind(chunks)}, not a list")
    return Tensor(
        _numbers(state.get("size")), _dtype(state.get("properties")), tuple(map(_chunk, chunks))
    )


def _dtype(properties: Any) -> torch.dtype:
    state = properties.state if isinstance(properties, Unknown) else None
    if isinstance(state, dict):
        dtype = state.get("dtype")
    else:
        dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype):
        raise ReadError("a tensor has no dtype")
    return dtype


def _chunk(chunk: Any) -> Chunk:
    state = _state(chunk, "ChunkStorageMetadata")
    return Chunk(_numbers(state.get("offsets")), _numbers(state.get("sizes")))


def _place(index: Any, info: Any) -> tuple[tuple[str, Numbers | None], FileRange]:
    where, state = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
    offset = where.get("offset")
    key = _text(where.get("fqn")), None if offset is None else _numbers(offset)
    file = _text(state.get("relative_path"))
    if Path(file).name != file or file in ("", "..") or "\0" in file:  # only in the folder
        raise ReadError(f"it places {key[0]!r} in {file!r}, which is no name of a file")
    if state.get("transform_descriptors"):
        raise ReadError(f"{key[0]!r} is compressed, which is not read here")
    start, length = _numbers((state.get("offset"), state.get("length")))
    return key, FileRange(file, start, length)


# --- what it places ------------------------------------------------------------------------------


@dataclass(slots=True)
class Shards:
    """The files of a folder in which metadata place values; each is mapped once."""

    folder: Path
    metadata: Metadata
    _mapped: dict[str, memoryview] = field(default_factory=dict)

    def read(self, key: str, offsets: Numbers | None = None) -> Any:
        """The saved value of a key: an object or, at ``offsets``, a tensor's piece.

        Raises:
            KeyError: the metadata have no place for it.
            OSError: the file cannot be read.
            ReadError: it is damaged.
        """
        place = self.metadata.places[key, offsets]
        if place.file not in self._mapped:
            self._mapped[place.file] = mapped(self.folder / place.file)
        view = self._mapped[place.file][place.offset : place.offset + place.length]
        if len(view) < place.length:
            raise ReadError(f"it ends {place.length - len(view)} bytes too early")
        return load_view(view)

    def object(self, key: str) -> Any:
        """The value of Megatron's ShardedObject; raises as ``read`` does."""
        value = self.read(key)
        if isinstance(value, Unknown) and value.named == ("_io", "BytesIO"):
            data = value.state[0] if isinstance(value.state, tuple) and value.state else None
            if not isinstance(data, bytes):
                raise ReadError("a BytesIO in it is damaged")
            value = load_view(memoryview(bytearray(data)))
        return value[0] if isinstance(value, list) and len(value) == 1 else value


def common(folder: Path, metadata: Metadata) -> dict[Any, Any]:
    """The values that are the same on all ranks: groups and arguments.

    Raises:
        OSError: the file cannot be read, or there is none.
        ValueError: it is damaged, or no dict.
    """
    key = next((key for key in metadata.entries if COMMON_KEY.match(key)), None)
    if key is None or (folder / COMMON_FILE).exists():
        value = load(folder / COMMON_FILE)
    else:
        value = Shards(folder, metadata).object(key)
    if not isinstance(value, dict):
        raise ReadError(f"it holds a {type(value).__name__}, not a dict")
    return value
