"""A row for each parameter of a checkpoint, and whether all of its state is there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from megatron_muon.lab.inspect.contents import Contents, Stored, canonical

_MOMENTS = {"exp_avg", "exp_avg_sq"}


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A parameter.

    Attributes:
        name: the parameter's name, with layers and experts numbered.
        shape: shape of the whole parameter; of one TP rank's part where the files say no more.
        is_part: whether it is the shape of a part.
        optimizer: the one whose state is saved, or that the digest names; None without either.
    """

    name: str
    shape: tuple[int, ...]
    is_part: bool
    optimizer: str | None


def parameters(
    contents: Contents, expected: Mapping[str, Mapping[str, Any]]
) -> tuple[list[StoredParameter], list[str]]:
    """A row for each parameter, from the parts that groups of ranks have saved; and faults.

    Args:
        expected: the digest's entries (``shape``, ``optimizer``) by name; empty without a digest.
    """
    wanted = {canonical(name): said for name, said in expected.items()}
    by_name: dict[str, list[Stored]] = defaultdict(list)
    for stored in contents.stored.values():
        # in the format torch names in the model are a rank's, with layers numbered from 0
        if stored.name is not None and (stored.kind != "model" or contents.format == "torch_dist"):
            by_name[stored.name].append(stored)
    rows, faults = [], []
    for name in sorted({*by_name, *wanted}, key=_natural):
        row, wrong = _row(name, by_name[name], wanted.get(name))
        rows.append(row)
        faults += wrong
    return rows, faults


def _row(
    name: str, pieces: Sequence[Stored], said: Mapping[str, Any] | None
) -> tuple[StoredParameter, list[str]]:
    momentum = [piece for piece in pieces if piece.kind == "momentum"]
    moments = {piece.key for piece in pieces if piece.kind == "adamw"}
    optimizer = "muon" if momentum else "adamw" if moments else None
    whole = [piece.shape for piece in pieces if not piece.part]
    if said is not None:
        whole = [tuple(said["shape"])]
    shape = whole[0] if whole else (pieces[0].numel,)
    numel = prod(shape) if whole else None
    due = said["optimizer"] if said else optimizer
    faults = []
    if said is None and optimizer is None and any(piece.kind == "main" for piece in pieces):
        faults.append(f"{name} has a main parameter, but neither momentum nor Adam's moments")
    if due == "muon" and not momentum:
        faults.append(f"{name} is Muon's and has no momentum")
    if due == "adamw" and (lacking := _MOMENTS - moments):
        faults.append(f"{name} is AdamW's and has no {' and no '.join(sorted(lacking))}")
    if said is not None and optimizer not in (None, due):
        faults.append(f"{name} has state of {optimizer}, but the digest says {due}")
    for key in sorted({piece.key for piece in pieces if piece.kind != "model"}):
        faults += _faults_of(name, key, [piece for piece in pieces if piece.key == key], numel)
    shown = optimizer or (None if due == "frozen" else due)
    return StoredParameter(name, shape, not whole, shown), faults


def _faults_of(name: str, key: str, same: Sequence[Stored], numel: int | None) -> list[str]:
    """The faults of a state tensor's pieces: TP ranks' parts, or replicas as large as the whole."""
    faults = [
        f"{key} of {name} is {piece.dtype}, not torch.float32 {_where(piece)}"
        for piece in same
        if piece.dtype != torch.float32
    ]
    sizes = [piece.numel for piece in same]
    if numel is None:  # of parts of unknown size each must be as large as it says itself
        if sizes != [prod(piece.shape) for piece in same]:
            faults.append(f"{key} of {name} lacks some of its elements {_where(*same)}")
    elif set(sizes) != {numel} and sum(sizes) != numel:
        there = " + ".join(map(str, sizes))
        faults.append(f"{key} of {name} has {there} elements, not {numel} {_where(*same)}")
    return faults


def _where(*pieces: Stored) -> str:
    files = sorted({file for piece in pieces for file in piece.files})
    return f"(in {', '.join(files)})" if files else "(in no file)"


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts layer 10 after layer 9."""
    parts = re.split("([0-9]+)", name)
    return [(len(p.lstrip("0")), p) if at % 2 else (-1, p) for at, p in enumerate(parts)]
