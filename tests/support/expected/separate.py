"""Muon on blocks of rows that are kept as separate parameters, on one process without
Megatron.

Which rows make a block is written from the modules' forward passes, without the
package; the arithmetic is the package's own, so that results are equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron_muon.orthogonalize.newton_schulz import orthogonalize
from support.runs.cases import (
    HEAD_SIZE,
    IN_PROJ,
    KV_RANK,
    ROPE_HEAD,
    Case,
    lr_at,
    whole_grad,
    whole_weight,
)

Blocks = list[list[int]]


def blocks_of(case: Case, name: str, rows: int, kind: str) -> Blocks:
    """The rows of each matrix of a weight by a kind of split."""
    leaf = name.rsplit(".", 2)[-2]
    if kind == "whole":
        return [list(range(rows))]
    if ":" in kind:
        return _of_ones_own(rows, *kind.split(":"))
    if leaf == "linear_qkv":
        return _of_attention(case, kind == "heads")
    if leaf == "linear_q_up_proj":
        return _cut([HEAD_SIZE + ROPE_HEAD] * case.heads)
    if leaf == "linear_kv_up_proj":
        each = _cut([HEAD_SIZE] * 2 * case.heads)
        return (
            each
            if kind == "heads"
            else [list(chain(*each[part::2])) for part in (0, 1)]
        )
    if leaf == "linear_kv_down_proj":
        return _cut([KV_RANK, ROPE_HEAD])
    if leaf == "in_proj":
        return _cut(IN_PROJ[case.mixer])
    assert leaf == "linear_fc1" and kind == "gate-up", (name, kind)
    return _cut([rows // 2] * 2)


def _cut(sizes: Sequence[int]) -> Blocks:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        list(range(start, start + size))
        for start, size in zip(starts, sizes, strict=True)
    ]


def _of_ones_own(rows: int, word: str, *numbers: str) -> Blocks:
    """``rows:A,B``, ``heads:N`` and ``groups:N:A,B``."""
    if word == "heads":
        return _cut([rows // int(numbers[0])] * int(numbers[0]))
    sizes = [int(size) for size in numbers[-1].split(",")]
    groups = int(numbers[0]) if word == "groups" else 1
    every = _cut(sizes * groups)
    return [list(chain(*every[part :: len(sizes)])) for part in range(len(sizes))]


def _of_attention(case: Case, heads: bool) -> Blocks:
    """Per query group its q heads, their gates if any, its k, its v (SelfAttention's
    views).
    """
    per_group = case.heads // case.groups
    parts = ["q"] * per_group + ["gate"] * per_group * case.output_gate + ["k", "v"]
    every = _cut([case.head_size] * len(parts) * case.groups)
    if heads:
        return every
    named = list(zip(parts * case.groups, every, strict=True))
    kinds = dict.fromkeys(parts)
    return [
        list(chain(*(rows for part, rows in named if part == own))) for own in kinds
    ]


def trained_apart(
    case: Case, name: str, shape: tuple[int, ...], kind: str
) -> dict[str, Tensor]:
    """A weight and its momentum after the case's steps, if each block is a parameter of
    its own.
    """
    places = list(_places(case, name, shape, kind))
    return _trained(case, name, shape, lambda step: (places, 1.0))


def trained_in_turns(
    case: Case, name: str, shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """``trained_apart`` of whole matrices in full steps, else of what each of two TP
    ranks has.
    """
    config = case.settings
    wholes = blocks_of(case, name, shape[0], "qkv" if "qkv" in name else "whole")
    halves = [
        half for rows in wholes for half in of_two_tp_ranks(case, name, rows, shape)
    ]

    def in_step(step: int) -> tuple[list[Any], float]:
        if step % config.full_period:
            return halves, config.block_lr_mult
        return wholes, 1.0

    return _trained(case, name, shape, in_step)


@torch.no_grad()
def _trained(
    case: Case,
    name: str,
    shape: tuple[int, ...],
    in_step: Callable[[int], tuple[list[Any], float]],
) -> dict[str, Tensor]:
    """A weight and its momentum, where each step has places and a factor of its rate."""
    weight = whole_weight(case, name, shape)
    momentum = torch.zeros(shape)
    for step in range(case.steps):
        grad = whole_grad(case, name, shape, step)
        places, factor = in_step(step)
        for place in places:
            own = weight[place].contiguous()
            moved = momentum[place].contiguous()
            _step(case, own, moved, grad[place], lr_at(case, step, name), factor)
            weight[place], momentum[place] = own, moved
    return {"main": weight, "exp_avg": momentum}


def of_two_tp_ranks(
    case: Case, name: str, rows: Sequence[int], shape: tuple[int, ...]
) -> list[Any]:
    """An index of what each of two TP ranks has of a dense layer's matrix with these
    rows.
    """
    leaf, (count, cols) = name.rsplit(".", 2)[-2], shape
    if leaf in ("linear_proj", "linear_fc2"):
        return [(slice(None), slice(cols // 2)), (slice(None), slice(cols // 2, None))]
    section = count // 2 if case.gated and leaf == "linear_fc1" else count
    each = [
        [row for row in rows if row % section // (section // 2) == rank]
        for rank in (0, 1)
    ]
    return [own for own in each if own]


def _places(case: Case, name: str, shape: tuple[int, ...], kind: str) -> Iterator[Any]:
    """An index of each block."""
    if kind.startswith("cols:"):
        width = int(kind.split(",")[-1])
        yield from (
            (slice(None), slice(at, at + width)) for at in range(0, shape[1], width)
        )
        return
    if len(shape) == 2:
        yield from blocks_of(case, name, shape[0], kind)
        return
    half = shape[2] // 2  # legacy experts: [experts, in, out]
    for expert in range(shape[0]):
        yield from (
            (expert, slice(None), cols) for cols in (slice(half), slice(half, None))
        )


def _step(
    case: Case,
    weight: Tensor,
    momentum: Tensor,
    grad: Tensor,
    lr: float,
    factor: float,
) -> None:
    config = case.settings
    momentum.mul_(config.momentum).add_(grad)
    pushed = momentum.mul(config.momentum).add_(grad).bfloat16()  # as it travels
    direction = orthogonalize(pushed, config)
    scale = factor * config.matched_adamw_rms * math.sqrt(max(weight.shape))
    weight.mul_(1.0 - lr * case.weight_decay)
    weight.sub_(direction.float().mul_(lr * scale))
