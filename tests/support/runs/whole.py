"""Put what the ranks hold together again into whole (TP 1, EP 1) tensors, and compare
them.

Needs torch only: it runs in the test's process, which imports no Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# kind ("params", "main", "exp_avg", …) → TP 1 name → tensor
Whole = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Cut:
    """A tensor is cut into ``count`` equal parts along ``dim``, and this is part
    ``index``.

    A gated fc1 holds gate rows and up rows: rank r has [gate_r; up_r]
    (megatron/core/transformer/ mlp.py, glu). So ``sections`` are sizes, in any unit, of
    ranges of ``dim`` that are each cut alike and put together.
    """

    dim: int
    index: int
    count: int
    sections: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a whole tensor.

    ``shape`` is the local one in the whole tensor's dims; the cuts are made one after
    another. Ranks with equal pieces of a parameter are replicas of each other.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()

    @property
    def whole_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        for cut_ in self.cuts:
            shape[cut_.dim] *= cut_.count
        return tuple(shape)


def cut(full: Tensor, piece: Piece) -> Tensor:
    """The part of ``full`` that a rank holds."""
    for one in piece.cuts:
        parts = [
            part.chunk(one.count, one.dim)[one.index] for part in _sections(full, one)
        ]
        full = torch.cat(parts, one.dim)
    assert full.shape == piece.shape
    return full


def join(parts: dict[tuple[Cut, ...], Tensor]) -> Tensor:
    """The reverse of ``cut``: all parts of a tensor, by their cuts."""
    if () in parts:
        (full,) = parts.values()
        return full
    groups: dict[Cut, dict[tuple[Cut, ...], Tensor]] = {}
    for (first, *rest), tensor in parts.items():
        groups.setdefault(first, {})[tuple(rest)] = tensor
    ordered = sorted(groups, key=lambda one: one.index)
    first = ordered[0]
    assert [one.index for one in ordered] == list(range(first.count)), (
        "parts are missing"
    )
    joined = [join(groups[one]) for one in ordered]
    cut_apart = [_sections(part, first) for part in joined]
    return torch.cat(
        [one for section in zip(*cut_apart, strict=True) for one in section], first.dim
    )


def _sections(tensor: Tensor, one: Cut) -> tuple[Tensor, ...]:
    rows = tensor.size(one.dim)
    total = sum(one.sections)
    return tensor.split([size * rows // total for size in one.sections], one.dim)


def whole(results: Sequence[dict[str, Any]]) -> Whole:
    """Put the ranks' results together, in TP 1, EP 1 coordinates.

    Shards that overlap or leave a hole, parts that are missing, and replicas (over DP
    and CP, optimizer instances, TP, pipeline stages) that differ are an AssertionError.
    """
    out: Whole = {"params": {}}
    for name in {name: None for result in results for name in result["params"]}:
        holders = {rank: r for rank, r in enumerate(results) if name in r["params"]}
        pieces = {r["pieces"][name]: None for r in holders.values()}
        tensors_by_piece = [
            _one_piece(
                name, {n: r for n, r in holders.items() if r["pieces"][name] == piece}
            )
            for piece in pieces
        ]
        for kind in _same_kinds(name, tensors_by_piece):
            parts = zip(pieces, tensors_by_piece, strict=True)
            out.setdefault(kind, {})[name] = join(
                {p.cuts: tensors[kind] for p, tensors in parts}
            )
    return out


def _one_piece(name: str, replicas: dict[int, dict[str, Any]]) -> dict[str, Tensor]:
    """All kinds of one piece, put together from the shards of the ranks that hold it.

    The ranks among which a parameter is sharded are its owners; each group of owners
    has all of the piece, and what several groups have must be the same.
    """
    params = [
        torch.from_numpy(replica["params"][name]) for replica in replicas.values()
    ]
    for rank, param in zip(replicas, params, strict=True):
        assert torch.equal(param, params[0]), (
            f"{name} differs on rank {rank}: replicas differ"
        )
    shape = next(iter(replicas.values()))["pieces"][name].shape
    copies = []
    # () if frozen
    for owners in {r["owners"].get(name, ()): None for r in replicas.values()}:
        assert set(owners) <= set(replicas), (
            f"{name}: {owners} own it, {set(replicas)} hold it"
        )
        shards = [
            replicas[r]["shards"][name] for r in owners if name in replicas[r]["shards"]
        ]
        copies.append(_joined_shards(name, shards, params[0].numel()) if owners else {})
    for kind in _same_kinds(name, copies):
        for copy in copies:
            # a test may have made a momentum NaN
            same = torch.equal(
                *(x[kind].nan_to_num(nan=12345.0) for x in (copy, copies[0]))
            )
            assert same, f"{kind} of {name}: replicas with owners of their own differ"
    tensors = {"params": params[0], **copies[0]}
    return {kind: tensor.view(shape) for kind, tensor in tensors.items()}


def _same_kinds(name: str, tensors_by_piece: list[dict[str, Tensor]]) -> list[str]:
    """The kinds that all have; else e.g. Muon would have one copy of a parameter, Adam
    another.
    """
    kinds = [list(tensors) for tensors in tensors_by_piece]
    assert all(each == kinds[0] for each in kinds), f"{name} has the kinds {kinds}"
    return kinds[0]


def _joined_shards(name: str, shards: list[Any], numel: int) -> dict[str, Tensor]:
    """Kind → flat tensor of ``numel`` elements, from ``(start, end, arrays by
    kind)``.
    """
    shards = sorted(shards, key=lambda shard: shard[0])
    edges = [0, *(end for _, end, _ in shards)]
    assert [start for start, _, _ in shards] == edges[:-1], (
        f"shards of {name} overlap or miss"
    )
    assert edges[-1] == numel, f"shards of {name} end at {edges[-1]}"
    return {
        kind: torch.cat([torch.from_numpy(arrays[kind]) for _, _, arrays in shards])
        for kind in shards[0][2]
    }


def of_optimizer(held: Whole) -> Whole:
    """All but the model's own weights."""
    return {kind: tensors for kind, tensors in held.items() if kind != "params"}


def differences(one: Whole, other: Whole) -> list[str]:
    """Kinds and names that are not bitwise equal; empty when all is."""
    assert one.keys() == other.keys(), (one.keys(), other.keys())
    unlike = []
    for kind, tensors in one.items():
        assert tensors.keys() == other[kind].keys(), tensors.keys() ^ other[kind].keys()
        unlike += [
            f"{kind} {n}"
            for n, t in tensors.items()
            if not torch.equal(t, other[kind][n])
        ]
    return unlike
