"""A row for each parameter of a checkpoint, and whether all of its state is there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod, sqrt
from typing import Any, Literal

import torch

from megatron_muon.lab.inspect.tensors import PADDING, Contents, Stored, canonical

_MOMENTS = {"exp_avg", "exp_avg_sq"}


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A parameter.

    Attributes:
        name: the parameter's name, with layers and experts numbered.
        shape: shape of the whole parameter; of one TP rank's part where the files say no more.
        is_part: whether it is the shape of a part.
        optimizer: the one whose state is saved, or that the digest names; None without either.
        norm: Frobenius norm of the momentum; None without one, or if pieces of it are missing.
    """

    name: str
    shape: tuple[int, ...]
    is_part: bool
    optimizer: Literal["muon", "adamw"] | None
    norm: float | None


@dataclass(frozen=True, slots=True)
class Parameters:
    """All rows, with faults and notes in sentences."""

    rows: tuple[StoredParameter, ...]
    faults: tuple[str, ...]
    notes: tuple[str, ...]


def parameters(contents: Contents, expected: Mapping[str, Mapping[str, Any]]) -> Parameters:
    """Join the parts that groups of ranks have saved of each parameter.

    Args:
        contents: the contents of the files.
        expected: the digest's entries (``shape``, ``optimizer``) by name; empty without a digest.
    """
    wanted = {canonical(name): said for name, said in expected.items()}
    by_name: dict[str, list[Stored]] = defaultdict(list)
    for stored in contents.stored.values():
        if stored.name is not None and (stored.kind != "model" or contents.format == "torch_dist"):
            by_name[stored.name].append(stored)
    rows, faults = [], []
    for name in sorted({*by_name, *wanted}, key=_natural):
        row, wrong = _row(name, by_name[name], wanted.get(name), contents)
        rows.append(row)
        faults += wrong
    faults += _not_finite(contents.stored.values())
    notes: list[str] = []
    if not wanted:
        faults += _without_state(contents)
        notes = _no_state(rows)
    return Parameters(tuple(rows), tuple(faults), tuple(notes))


def _row(
    name: str,
    pieces: Sequence[Stored],
    said: Mapping[str, Any] | None,
    contents: Contents,
) -> tuple[StoredParameter, list[str]]:
    momentum = [piece for piece in pieces if piece.kind == "momentum"]
    moments = {piece.key for piece in pieces if piece.kind == "adamw"}
    optimizer: Literal["muon", "adamw"] | None = (
        "muon" if momentum else "adamw" if moments else None
    )
    shape, is_part = _shape(name, pieces, said, contents)
    numel = None if is_part else prod(shape)
    faults = []
    due = said["optimizer"] if said else optimizer
    if said is None and optimizer is None and any(piece.kind == "main" for piece in pieces):
        faults.append(f"{name} has a main parameter, but neither momentum nor Adam's moments")
    if due == "muon" and not momentum:
        faults.append(f"{name} is Muon's and has no momentum")
    if due == "adamw" and (lacking := _MOMENTS - moments):
        faults.append(f"{name} is AdamW's and has no {' and no '.join(sorted(lacking))}")
    if due == "frozen":
        due = None
    if said is not None and optimizer not in (None, due):
        faults.append(f"{name} has state of {optimizer}, but the digest says {said['optimizer']}")
    norm = None
    for key in sorted({piece.key for piece in pieces if piece.kind != "model"}):
        same = [piece for piece in pieces if piece.key == key]
        faults += _wrong(name, key, same, numel)
        square = _square(same, numel)
        if key == (momentum[0].key if momentum else None) and square is not None:
            norm = sqrt(square)
    return StoredParameter(name, shape, is_part, optimizer or due, norm), faults


def _shape(
    name: str, pieces: Sequence[Stored], said: Mapping[str, Any] | None, contents: Contents
) -> tuple[tuple[int, ...], bool]:
    """The shape, and whether it is only a part's: neither the digest nor a file has the whole."""
    if said is not None:
        return tuple(said["shape"]), False
    whole = next((piece for piece in pieces if not piece.part), None)
    if whole is not None:
        return whole.shape, False
    numel = pieces[0].numel
    weights = [s for s in contents.stored.values() if s.kind == "model" and s.name == name]
    shapes = {weight.shape for weight in weights if prod(weight.shape) == numel}
    return (shapes.pop() if len(shapes) == 1 else (numel,)), True


def _wrong(name: str, key: str, same: Sequence[Stored], numel: int | None) -> list[str]:
    """Faults in dtype and size of one state tensor of a parameter."""
    faults = []
    for piece in same:
        if piece.dtype != torch.float32:
            faults.append(f"{key} of {name} is {piece.dtype}, not torch.float32 {_where(piece)}")
    sizes = [piece.numel for piece in same]
    if numel is not None and set(sizes) != {numel} and sum(sizes) != numel:
        faults.append(
            f"{key} of {name} has {' + '.join(map(str, sizes))} elements, not {numel} "
            f"{_where(*same)}"
        )
    elif numel is None and any(size != prod(p.shape) for size, p in zip(sizes, same, strict=True)):
        faults.append(f"{key} of {name} has not all its elements {_where(*same)}")
    return faults


def _square(same: Sequence[Stored], numel: int | None) -> float | None:
    """Sum of squares over the pieces, with TP replicas counted once; None if pieces are missing.

    Where the size of the whole is not known, pieces with the same size and the very same sum count
    as replicas.
    """
    sizes = [piece.numel for piece in same]
    if numel is None:
        replicas = len({(piece.numel, piece.square) for piece in same}) == 1
        return same[0].square if replicas else sum(piece.square for piece in same)
    if set(sizes) == {numel}:
        return same[0].square
    return sum(piece.square for piece in same) if sum(sizes) == numel else None


def _not_finite(every: Iterable[Stored]) -> list[str]:
    return [
        f"{'a tensor of several parameters' if s.name is None else s.name} has {s.key} that is not "
        f"finite {_where(s)}"
        for s in every
        if not isfinite(s.square)
    ]


def _without_state(contents: Contents) -> list[str]:
    """Faults of groups of ranks with more elements of flat main parameters than of state."""
    main: dict[str, int] = defaultdict(int)
    state: dict[str, int] = defaultdict(int)
    names: dict[str, set[str]] = defaultdict(set)
    flat_moments = False
    for stored in contents.stored.values():
        part = stored.part.split(" buffer ")[0]
        if stored.name is None:
            flat_moments |= stored.kind == "adamw"
            main[part] += stored.numel * (stored.kind == "main")
        elif stored.kind == "momentum" or stored.key == "exp_avg":
            state[part] += stored.numel
            names[part].add(stored.name)
    if flat_moments:  # AdamW's own format: no state by name
        return []
    return [
        f"{part} has {main[part]} elements of main parameters, of which {lacking}, padding "
        "included, have neither momentum nor Adam's moments"
        for part in main
        if (lacking := main[part] - state[part]) > PADDING * (len(names[part]) + 1)
    ]


def _no_state(rows: Sequence[StoredParameter]) -> list[str]:
    """Notes on parameters without state, which may be frozen or lost if there is no digest."""
    if not any(row.optimizer for row in rows):
        return ["no optimizer state is known by the name of its parameter"] if rows else []
    without = [row.name for row in rows if row.optimizer is None]
    if not without:
        return []
    more = f" and {len(without) - 3} more" if len(without) > 3 else ""
    return [f"no optimizer state of {', '.join(without[:3])}{more}: frozen, or missing"]


def _where(*pieces: Stored) -> str:
    files = sorted({file for piece in pieces for file in piece.files})
    return f"(in {', '.join(files)})" if files else "(in no file)"


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts layer 10 after layer 9."""
    parts = re.split("([0-9]+)", name)
    return [(len(p.lstrip("0")), p) if at % 2 else (-1, p) for at, p in enumerate(parts)]
