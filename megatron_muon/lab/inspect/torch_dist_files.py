"""Reading checkpoints in ``torch_dist`` without a process group, Megatron or code from a file."""

from __future__ import annotations

import re
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_muon.lab.inspect.contents import KINDS, RECORD, Contents, Kind
from megatron_muon.mcore.checkpoint.read import Unknown
from megatron_muon.mcore.checkpoint.torch_dist import (
    COMMON_FILE,
    COMMON_KEY,
    METADATA,
    Metadata,
    Numbers,
    checked,
    common,
    numbers,
    read_metadata,
    state_of,
)

_CHAINED = r"(?:(?P<chained>chained_\d+)\.)?optimizer\."
_BY_NAME = re.compile(_CHAINED + r"distributed\.(?P<group>dp_group_idx_\d+)\.megatron_muon\.(.*)$")
_MODEL_SPACE = re.compile(_CHAINED + r"state\.(.*)$")
_BUCKET = re.compile(_CHAINED + r"distributed\.(?P<group>dp_group_idx_\d+)\.gbuf_.*\.(\w+)$")
_OBJECT = re.compile(_CHAINED + r"distributed\.(?P<group>dp_group_idx_\d+)\.(\w+)/shard_")
_STACK = re.compile(r"\.layers\.(?=\D)")


class Chunk(NamedTuple):
    """A slice of a tensor, in elements."""

    offsets: Numbers
    sizes: Numbers


class Tensor(NamedTuple):
    """A whole tensor, as the metadata describe it."""

    size: Numbers
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def tensor_of(entry: Unknown) -> Tensor | None:
    """What the metadata say of a tensor; None for an object. ReadError if they are damaged."""
    if entry.named[1] == "BytesStorageMetadata":
        return None
    state = state_of(entry, "TensorStorageMetadata")
    properties = state["properties"].state  # a dict, or in older torch a tuple
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    chunks = (state_of(chunk, "ChunkStorageMetadata") for chunk in checked(list, state["chunks"]))
    return Tensor(
        numbers(state["size"]),
        checked(torch.dtype, dtype),
        tuple(Chunk(numbers(chunk["offsets"]), numbers(chunk["sizes"])) for chunk in chunks),
    )


def read_torch_dist(folder: Path) -> Contents:
    """The contents of a checkpoint; parts that cannot be read are among its faults."""
    contents = Contents(folder, "torch_dist")
    missing = [name for name in ("metadata.json", METADATA) if not (folder / name).is_file()]
    contents.faults += [f"{name} is missing" for name in missing]
    metadata, tensors = Metadata(folder, {}, {}), dict[str, Tensor | None]()
    if METADATA not in missing:
        both = contents.read(METADATA, lambda: _described(read_metadata(folder)))
        metadata, tensors = both or (metadata, tensors)
    contents.keys = frozenset(metadata.entries)
    if (folder / COMMON_FILE).exists() or any(map(COMMON_KEY.match, contents.keys)):
        contents.read(COMMON_FILE, lambda: _add_common(contents, metadata))
    elif contents.keys:
        contents.faults.append(f"{COMMON_FILE} is missing")
    for key, described in tensors.items():
        if described is not None:
            _add_tensor(contents, metadata, key, described)
        elif (at := _OBJECT.match(key)) and at[3] in ("optimizer", RECORD, "param_state"):
            _add_object(contents, metadata, key, at)
    return contents


def _described(metadata: Metadata) -> tuple[Metadata, dict[str, Tensor | None]]:
    return metadata, {key: tensor_of(entry) for key, entry in metadata.entries.items()}


def _add_common(contents: Contents, metadata: Metadata) -> None:
    saved = common(metadata)
    contents.add_states(saved.get("optimizer"))
    contents.common = {key: value for key, value in saved.items() if isinstance(key, str)}


def _place(key: str) -> tuple[Kind, str, str | None, str] | None:
    """(kind, key, name, part) of a tensor on disk; the name may be that of a stack of layers.

    None where the tensor is no part of a parameter's state.
    """
    if at := _BY_NAME.match(key) or _MODEL_SPACE.match(key):
        what, _, name = at[at.lastindex or 0].partition(".")
        return (KINDS[what], what, name, _part(at)) if what in KINDS else None
    if at := _BUCKET.match(key):
        return KINDS.get(at[3], "main"), at[3], None, _part(at)
    return None if key.startswith(("optimizer.", "chained_")) else ("model", "weight", key, "")


def _part(at: re.Match[str]) -> str:
    """The group of ranks in a key; empty where whole weights are saved."""
    group = at.groupdict().get("group")
    return f"{at['chained'] or ''} {group}".strip() if group else ""


def _add_tensor(contents: Contents, metadata: Metadata, key: str, described: Tensor) -> None:
    """Add a tensor by its metadata; its pieces are not read, but their bytes must be there."""
    place = _place(key)
    if place is None:
        return
    kind, what, name, part = place
    size, dtype, seen = described.size, described.dtype, 0
    axes = _stack_axes(name, size) if name is not None else 0
    for chunk in described.chunks:
        file = _file_of(contents, metadata, key, chunk, dtype)
        if file is None:
            continue
        numel = prod(chunk.sizes)
        seen += numel
        if not axes or not numel:
            contents.at(kind, what, name, part, size, dtype).add(numel, file)
            continue
        for index in product(*(range(n) for n in chunk.sizes[:axes])):
            numbers = [at + offset for at, offset in zip(index, chunk.offsets, strict=False)]
            one = contents.at(kind, what, _unstacked(str(name), numbers), part, size[axes:], dtype)
            one.add(prod(chunk.sizes[axes:]), file)
    if seen != prod(size) and not contents.faults:
        contents.faults.append(f"{key} has {prod(size)} elements, {seen} are in the files")
    if not described.chunks:
        contents.at(kind, what, name, part, size, dtype)


def _file_of(
    contents: Contents, metadata: Metadata, key: str, chunk: Chunk, dtype: torch.dtype
) -> str | None:
    """The file that has a tensor's piece; None where it has not, which is noted, once per file."""
    place = metadata.places.get((key, chunk.offsets))
    if place is None:
        contents.faults.append(f"{METADATA} does not say where {key} is")
        return None
    path = metadata.folder / place.file
    if not path.is_file():
        fault = f"{place.file} is missing, or no file"
    elif path.stat().st_size < place.offset + place.length:
        fault = f"{place.file} ends before {key}"
    elif place.length < prod(chunk.sizes) * dtype.itemsize:
        fault = f"{METADATA} gives {key} too few bytes in {place.file}"
    else:
        return place.file
    if not any(told.startswith(place.file) for told in contents.faults):
        contents.faults.append(fault)
    return None


def _stack_axes(name: str, size: tuple[int, ...]) -> int:
    axes = bool(_STACK.search(name)) + (".experts.experts." in name)
    return axes if len(size) > axes else 0


def _unstacked(name: str, numbers: list[int]) -> str:
    if _STACK.search(name):
        layer, *numbers = numbers
        name = _STACK.sub(f".layers.{layer}.", name, count=1)
    if ".experts.experts." in name:
        name = name.replace(".experts.experts.", f".experts.local_experts.{numbers[0]}.")
    return name


def _add_object(contents: Contents, metadata: Metadata, key: str, at: re.Match[str]) -> None:
    """Add an object that ranks save as a whole: groups, Muon's record, or dp_zero's state."""
    place = metadata.places.get((key, None))
    if place is None:
        contents.faults.append(f"{METADATA} does not say where {key} is")
        return

    def add() -> None:
        value = metadata.object(key)
        if at[3] == "param_state":
            contents.add_buffers(value, _part(at), place.file)
        else:
            contents.add_states({at[3]: value})

    contents.read(f"{place.file} at {key}", add)
