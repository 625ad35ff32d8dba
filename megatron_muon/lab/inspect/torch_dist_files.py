"""Reading checkpoints in ``torch_dist`` without a process group, Megatron or code from a file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_muon.lab.inspect.tensors import (
    DAMAGE,
    KINDS,
    RECORD,
    Contents,
    Kind,
    add_buffers,
    by_name,
    said,
    state_dicts,
    within,
)
from megatron_muon.mcore.checkpoint.shifted import FAULT, is_elsewheres
from megatron_muon.mcore.checkpoint.torch_dist import (
    COMMON_FILE,
    COMMON_KEY,
    METADATA,
    Chunk,
    Metadata,
    Shards,
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
    """The contents of a checkpoint in ``torch_dist``; unreadable parts are among its faults.

    Args:
        folder: the folder of one iteration.
    """
    contents = Contents("torch_dist")
    for name in ("metadata.json", METADATA):
        if not (folder / name).is_file():
            contents.faults.append(f"{name} is missing")
    try:
        metadata = read_metadata(folder)
    except FileNotFoundError:
        metadata = Metadata({}, {})
    except (OSError, ValueError) as error:
        contents.faults.append(f"{METADATA} cannot be read: {said(error)}")
        metadata = Metadata({}, {})
    contents.keys = frozenset(metadata.entries)
    common_is_file = (folder / COMMON_FILE).exists()
    if common_is_file or any(map(COMMON_KEY.match, contents.keys)):
        within(
            COMMON_FILE if common_is_file else "what is common to all ranks",
            contents,
            lambda: _add_common(contents, common(folder, metadata)),
        )
    elif contents.keys:
        contents.faults.append(f"{COMMON_FILE} is missing")
    reader = _Reader(Shards(folder, metadata), contents)
    for key, described in metadata.entries.items():
        if described is not None:
            _tensor(contents, reader, key, described)
        elif at := _OBJECT.match(key):
            _optimizer_object(contents, reader, key, at)
    if contents.shifted:
        names = ", ".join(contents.shifted[:3]) + ", …" * (len(contents.shifted) > 3)
        contents.faults.append(
            f"main parameters are not those of the model's weights: {names}. {FAULT}: load the "
            "model alone (--no-load-optim)"
        )
    for state in contents.states:
        kind = state.get("param_state_sharding_type")
        contents.sharding |= {kind} if isinstance(kind, str) else set()
    return contents


def _add_common(contents: Contents, saved: dict[Any, Any]) -> None:
    states = state_dicts(saved.get("optimizer"))
    contents.common, contents.states = by_name(saved), contents.states + states


@dataclass
class _Reader:
    shards: Shards
    contents: Contents
    broken: set[str] = field(default_factory=set)  # files with a fault that is noted already

    def read(self, key: str, offsets: tuple[int, ...] | None = None) -> tuple[Any, str] | None:
        """A saved value and its file; None if it cannot be read, which is noted as a fault.

        Args:
            key: key of the tensor or object.
            offsets: offsets of the tensor's piece; None for an object.
        """
        place = self.shards.metadata.places.get((key, offsets))
        if place is None:
            self.contents.faults.append(f"{METADATA} does not say where {key} is")
            return None
        shards = self.shards
        try:
            value = shards.object(key) if offsets is None else shards.read(key, offsets)
        except FileNotFoundError:
            self.note(place.file, f"{place.file} is missing; {key} is in it")
        except DAMAGE as error:
            self.note(place.file, f"{place.file} cannot be read at {key}: {said(error)}")
        else:
            return value, place.file
        return None

    def is_of_another(self, name: str, chunk: Chunk, main: torch.Tensor) -> bool:
        """Whether a piece of a main parameter is not that of the model's weight, if it is there."""
        if (name, chunk.offsets) not in self.shards.metadata.places:
            return False
        try:
            weight = self.shards.read(name, chunk.offsets)
        except DAMAGE:  # noted where the weight itself is read
            return False
        alike = isinstance(weight, torch.Tensor) and weight.shape == main.shape
        return alike and is_elsewheres(main, weight)

    def note(self, file: str, fault: str) -> None:
        """Add a file's first fault; later ones are dropped."""
        if file not in self.broken:
            self.broken.add(file)
            self.contents.faults.append(fault)


def _place(key: str) -> tuple[Kind, str, str | None, str] | None:
    """(kind, key, name, part) of a tensor on disk; the name may be that of a stack of layers.

    None where the tensor is no part of a parameter's state.
    """
    if at := _BY_NAME.match(key):
        what, _, name = at[3].partition(".")
        part = f"{at['chained'] or ''} {at['group']}".strip()
        return (KINDS[what], what, name, part) if what in KINDS else None
    if at := _MODEL_SPACE.match(key):
        what, _, name = at[2].partition(".")
        return (KINDS[what], what, name, "") if what in KINDS else None
    if at := _BUCKET.match(key):
        part = f"{at['chained'] or ''} {at['group']}".strip()
        return KINDS.get(at[3], "main"), at[3], None, part
    return None if key.startswith(("optimizer.", "chained_")) else ("model", "weight", key, "")


def _tensor(contents: Contents, reader: _Reader, key: str, described: Tensor) -> None:
    place = _place(key)
    if place is None:
        return
    kind, what, name, part = place
    size = described.size
    axes = _stack_axes(name, size) if name is not None else 0
    seen, strange = 0, False
    for chunk in described.chunks:
        got = reader.read(key, chunk.offsets)
        if got is None:
            continue
        tensor, file = got
        if wrong := _other_piece(tensor, chunk, described):
            reader.note(file, f"{file} is not what {METADATA} says: at {key} it has {wrong}")
            continue
        if what == "param" and name is not None and reader.is_of_another(name, chunk, tensor):
            strange = True
        seen += tensor.numel()
        if seen > prod(size):
            contents.faults.append(f"{key} has {prod(size)} elements, more are in the files")
            return
        if tensor.dim() != len(size) or not axes or not tensor.numel():
            entry = contents.at(kind, what, name, part, size, tensor.dtype)
            entry.add(tensor, file, may_be_padding=name is None)
            continue
        for index in product(*(range(n) for n in tensor.shape[:axes])):
            numbers = [at + offset for at, offset in zip(index, chunk.offsets, strict=False)]
            one = _unstacked(str(name), numbers)
            contents.at(kind, what, one, part, size[axes:], tensor.dtype).add(tensor[index], file)
    if strange:
        contents.shifted.append(str(name))
    if seen < prod(size) and not reader.broken:
        contents.faults.append(f"{key} has {prod(size)} elements, only {seen} are in the files")
    if not described.chunks:
        contents.at(kind, what, name, part, size, described.dtype)


def _other_piece(tensor: Any, chunk: Chunk, described: Tensor) -> str | None:
    """A piece's fault in words; None where it is as the metadata describe it."""
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}, not a tensor"
    if tensor.dtype != described.dtype:
        return f"{tensor.dtype}, not {described.dtype}"
    if tensor.numel() != prod(chunk.sizes):
        return f"{tensor.numel()} elements, not {prod(chunk.sizes)}"
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


def _optimizer_object(contents: Contents, reader: _Reader, key: str, at: re.Match[str]) -> None:
    """Add an object that ranks save as a whole: groups, Muon's record, or dp_zero's state."""
    what = at[3]
    if what not in ("optimizer", RECORD, "param_state"):
        return
    got = reader.read(key)
    if got is None:
        return
    value, file = got
    part = f"{at['chained'] or ''} {at['group']}".strip()
    if what == "param_state":
        within(f"{file} at {key}", contents, lambda: add_buffers(contents, value, part, file))
    else:
        within(
            f"{file} at {key}", contents, lambda: contents.states.extend(state_dicts({what: value}))
        )
