"""Elementwise work on local shards: momentum before the exchange, the update after it.

Here it is done by torch's operations on lists, one call for many tensors with at most
``ELEMENTS_AT_ONCE``, which bounds scratch memory; ``fused`` has kernels that make the same bits.
Every operation rounds once, so results do not depend on where a shard is cut. Fused multiply-adds
are not used: one may round differently in a kernel's vector body and in its tail.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_muon.planning.rounds.cut import ELEMENTS_AT_ONCE
from megatron_muon.settings.config import MuonConfig

_IN_CACHE = 1 << 16  # elements: three tensors of them in fp32 are 768 KiB


class Elementwise(Protocol):
    """The elementwise operations on one rank's slices of one round, for every step."""

    def advance_momentum(
        self,
        momentum_buffers: Sequence[Tensor],
        grads: Sequence[Tensor],
        into: Sequence[Tensor | None],
        moves: Tensor,
        leaving: Sequence[int],
        *,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """M ← μM + G in place, and copy the input of Newton-Schulz (arXiv 2502.16982, eq. 1).

        Args:
            momentum_buffers: M of each slice, ``(n,)`` fp32; updated.
            grads: G of each slice, ``(n,)``, reduced and clipped.
            into: for each slice, ``(n,)`` in the dtype that travels: takes G + μM, or M with
                ``nesterov`` off. None for a replica, whose elements another rank sends.
            moves: ``(len(leaving),)``: takes 1 for a slice whose gradient is not all zero, else 0.
            leaving: numbers of the slices that ``moves`` is about, in its order.
            momentum: μ.
            nesterov: see ``into``.
        """

    def apply_updates(
        self,
        params: Sequence[Tensor],
        directions: Sequence[Tensor],
        factors: Sequence[float],
        decays: Sequence[float],
    ) -> None:
        """W ← (1 - lr·λ)W - update, in place (eq. 4; the decay is decoupled and unscaled).

        A slice whose direction begins with NaN or Inf stays as it is (``RoundExchange.mark``).

        Args:
            params: main parameters of each slice, ``(n,)`` fp32.
            directions: of each slice, ``(n,)`` in the dtype that travels; in fp32 they may be
                overwritten.
            factors: the factor of each direction: lr times its matrix's scale.
            decays: lr·λ of each slice.
        """


class Foreach:
    """Torch's operations on lists, on any device."""

    def advance_momentum(
        self,
        momentum_buffers: Sequence[Tensor],
        grads: Sequence[Tensor],
        into: Sequence[Tensor | None],
        moves: Tensor,
        leaving: Sequence[int],
        *,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """See ``Elementwise``."""
        for _, (buffers, added, taken) in _at_once(momentum_buffers, grads, into):
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, added)
            sent = [number for number, target in enumerate(taken) if target is not None]
            if not sent:
                continue
            inputs = [buffers[number] for number in sent]
            if nesterov:
                inputs = list(torch._foreach_mul(inputs, momentum))
                torch._foreach_add_(inputs, [added[number] for number in sent])
            torch._foreach_copy_([taken[number] for number in sent], inputs)
        if leaving:
            some = [grads[number] for number in leaving]
            if moves.is_cpu:  # where that norm takes twenty times as long
                found = [grad.count_nonzero() for grad in some]
            else:
                found = list(torch._foreach_norm(some, math.inf))
            moves.copy_(torch.stack(found) != 0)

    def apply_updates(
        self,
        params: Sequence[Tensor],
        directions: Sequence[Tensor],
        factors: Sequence[float],
        decays: Sequence[float],
    ) -> None:
        """See ``Elementwise``; directions in fp32 are overwritten."""
        if not params:
            return
        stays = torch.stack([direction[0] for direction in directions]).isfinite().logical_not_()
        may_stay = stays.tolist() if stays.is_cpu else [True] * len(params)
        keeps = {decay: torch.where(stays, 1.0, 1.0 - decay) for decay in {*decays} - {0.0}}
        for numbers, (weights, some) in _at_once(params, directions):
            updates = _in_fp32(some)
            torch._foreach_mul_(updates, [factors[number] for number in numbers])
            for number, weight, update in zip(numbers, weights, updates, strict=True):
                if may_stay[number]:
                    update.masked_fill_(stays[number], 0.0)  # a product with 0 would keep NaN
                if decays[number] != 0.0:
                    weight.mul_(keeps[decays[number]][number])
            torch._foreach_sub_(weights, updates)


def update_scale(rows: int, cols: int, config: MuonConfig) -> float:
    """The factor from direction to update, per unit of lr: rms·√max(rows, cols) (eq. 4).

    The other modes are those of ``get_muon_scale_factor`` in NVIDIA's Emerging-Optimizers:
    rms·√(rows/cols) for ``unit_rms_norm``, rms·√max(1, rows/cols) for ``shape_scaling``.

    Args:
        rows, cols: outputs and inputs of the whole matrix, not of a rank's slice.
        config: ``matched_adamw_rms`` and ``scale_mode`` are read. With ``spectral``, the former is
            the root mean square of an update of a full-rank matrix, per unit of lr.
    """
    squares = {
        "spectral": max(rows, cols),
        "unit_rms_norm": rows / cols,
        "shape_scaling": max(1.0, rows / cols),
    }
    return config.matched_adamw_rms * math.sqrt(squares[config.scale_mode])


def _in_fp32(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in fp32; the tensors themselves where they are in fp32 already."""
    if tensors[0].dtype == torch.float32:
        return tensors
    sizes = [tensor.numel() for tensor in tensors]
    scratch = tensors[0].new_empty(sum(sizes), dtype=torch.float32)
    copies = list(torch.split(scratch, sizes))
    torch._foreach_copy_(copies, tensors)
    return copies


def _at_once(*lists: Sequence[Any]) -> Iterator[tuple[list[int], tuple[list[Any], ...]]]:
    """Parts of parallel lists, with at most ``ELEMENTS_AT_ONCE`` each, and their tensors' numbers.

    A larger tensor is cut; None stays. On a CPU a part fits into a core's cache.
    """
    numbers: list[int] = []
    some: tuple[list[Any], ...] = tuple([] for _ in lists)
    most = room = _IN_CACHE if lists[0] and lists[0][0].is_cpu else ELEMENTS_AT_ONCE
    for number, tensors in enumerate(zip(*lists, strict=True)):
        size, start = tensors[0].numel(), 0
        while start < size:
            if room == 0 or (size - start > room and size <= most):
                yield numbers, some
                numbers, some, room = [], tuple([] for _ in lists), most
            stop = min(size, start + room)
            whole = stop - start == size
            for part, tensor in zip(some, tensors, strict=True):
                part.append(tensor if whole or tensor is None else tensor[start:stop])
            numbers.append(number)
            room -= stop - start
            start = stop
    if numbers:
        yield numbers, some
