"""Reading checkpoints in ``torch_dist`` without a process group, Megatron or code from a file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_muon.lab.inspect.contents import KINDS, RECORD, Contents, Kind
from megatron_muon.mcore.checkpoint.torch_dist import (
    COMMON_FILE,
    COMMON_KEY,
    METADATA,
    Chunk,
    Metadata,
    Tensor,
    common,
    read_metadata,
)

_CHAINED = r"(?:(?P<chained>chained_\d+)\.)?optimizer\."
_BY_NAME = re.compile(_CHAINED + r"distributed\.(?P<group>dp_group_idx_\d+)\.megatron_muon\.(.*)$")
_MODEL_SPACE = re.compile(_CHAINED + r"state\.(.*)$")
_BUCKET = re.compile(_CHAINED + r"distributed\.(?P<group>dp_group_idx_\d+)\.gbuf_.*\.(\w+)$")
_OBJECT = re.compile(_CHAINED + r"distributed\.(?P<group>dp_group_idx_\d+)\.(\w+)/shard_")
_STACK = re.compile(r"\.layers\.(?=\D)")


def read_torch_dist(folder: Path) -> Contents:
    """The contents of a checkpoint; parts that cannot be read are among its faults."""
    contents = Contents(folder, "torch_dist")
    missing = [name for name in ("metadata.json", METADATA) if not (folder / name).is_file()]
    contents.faults += [f"{name} is missing" for name in missing]
    metadata = None
    if METADATA not in missing:
        metadata = contents.read(METADATA, lambda: read_metadata(folder))
    metadata = metadata or Metadata(folder, {}, {})
    contents.keys = frozenset(metadata.entries)
    if (folder / COMMON_FILE).exists() or any(map(COMMON_KEY.match, contents.keys)):
        contents.read(COMMON_FILE, lambda: _add_common(contents, metadata))
    elif contents.keys:
        contents.faults.append(f"{COMMON_FILE} is missing")
    reader = _Reader(metadata, contents)
    for key, described in metadata.entries.items():
        if described is not None:
            _add_tensor(reader, key, described)
        elif (at := _OBJECT.match(key)) and at[3] in ("optimizer", RECORD, "param_state"):
            _add_object(reader, key, at)
    return contents


def _add_common(contents: Contents, metadata: Metadata) -> None:
    saved = common(metadata)
    contents.add_states(saved.get("optimizer"))
    contents.common = {key: value for key, value in saved.items() if isinstance(key, str)}


@dataclass
class _Reader:
    metadata: Metadata
    contents: Contents
    broken: set[str] = field(default_factory=set)  # files with a fault that is noted already

    def read(self, key: str, offsets: tuple[int, ...] | None = None) -> tuple[Any, str] | None:
        """A saved value and its file; None if it cannot be read, which is noted as a fault.

        Args:
            key: key of the tensor or object.
            offsets: offsets of the tensor's piece; None for an object.
        """
        place = self.metadata.places.get((key, offsets))
        if place is None:
            self.contents.faults.append(f"{METADATA} does not say where {key} is")
            return None
        if place.file in self.broken:
            return None
        before = len(self.contents.faults)
        saved = self.metadata
        value = self.contents.read(
            f"{place.file} at {key}",
            lambda: saved.object(key) if offsets is None else saved.value(key, offsets),
        )
        if len(self.contents.faults) > before:
            self.broken.add(place.file)
            return None
        return value, place.file


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


def _add_tensor(reader: _Reader, key: str, described: Tensor) -> None:
    place = _place(key)
    if place is None:
        return
    kind, what, name, part = place
    contents, size, seen = reader.contents, described.size, 0
    axes = _stack_axes(name, size) if name is not None else 0
    for chunk in described.chunks:
        got = reader.read(key, chunk.offsets)
        if got is None:
            continue
        tensor, file = got
        if wrong := _other_piece(tensor, chunk, described):
            reader.broken.add(file)
            contents.faults.append(f"{file} is not what {METADATA} says: at {key} it has {wrong}")
            continue
        seen += tensor.numel()
        if not axes or not tensor.numel():
            entry = contents.at(kind, what, name, part, size, tensor.dtype)
            entry.add(tensor, file, may_be_padding=name is None)
            continue
        for index in product(*(range(n) for n in tensor.shape[:axes])):
            numbers = [at + offset for at, offset in zip(index, chunk.offsets, strict=False)]
            one = _unstacked(str(name), numbers)
            contents.at(kind, what, one, part, size[axes:], tensor.dtype).add(tensor[index], file)
    if seen != prod(size) and not reader.broken:
        contents.faults.append(f"{key} has {prod(size)} elements, {seen} are in the files")
    if not described.chunks:
        contents.at(kind, what, name, part, size, described.dtype)


def _other_piece(tensor: Any, chunk: Chunk, described: Tensor) -> str | None:
    """A piece's fault in words; None where it is as the metadata describe it."""
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}, not a tensor"
    if tensor.dtype != described.dtype:
        return f"{tensor.dtype}, not {described.dtype}"
    if tuple(tensor.shape) != chunk.sizes:
        return f"the shape {tuple(tensor.shape)}, not {chunk.sizes}"
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


def _add_object(reader: _Reader, key: str, at: re.Match[str]) -> None:
    """Add an object that ranks save as a whole: groups, Muon's record, or dp_zero's state."""
    got = reader.read(key)
    if got is None:
        return
    value, file = got
    contents = reader.contents
    if at[3] == "param_state":
        contents.read(f"{file} at {key}", lambda: contents.add_buffers(value, _part(at), file))
    else:
        contents.read(f"{file} at {key}", lambda: contents.add_states({at[3]: value}))
