"""A momentum in bf16, rounded at random: up or down with chances that make the mean
exact.

Chances come from a hash of the step and of the element's matrix, row and column, in
integers. So bits depend on no layout and no device, and a resumed run has them again.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from megatron_muon.planning.layout import Parameter, range_of
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.slices import Matrix, Slice
from megatron_muon.rules.int8_momentum import AT_ONCE, InBlocks, Packed
from megatron_muon.rules.muon import DistributedMuon


class Elements(NamedTuple):
    """A shard's elements, numbered independently of the layout: the number of an
    element is that of its row plus that of its column, in int32.
    """

    rows: Tensor  # numbers of the rows that the shard has elements of
    columns: Tensor  # numbers of the TP slice's columns
    before: int  # elements of the first row that the shard does not have


def _numbered(
    plan: ExchangePlan, slices: list[Slice], device: torch.device
) -> Elements:
    """The numbers of a shard's elements, from its slices."""
    parameter = plan.parameters[slices[0].parameter]
    parts = parameter.column_parts
    rows: list[Tensor] = []
    before = 0
    for one in slices:
        matrix = plan.matrices[one.matrix]
        strip = matrix.strip
        cols = matrix.cols // matrix.column_parts
        part, place = divmod(one.start, matrix.rows * cols)
        row, col = divmod(place, cols)
        if strip is not None and strip.parts is not None:
            part += strip.parts.start
        elif strip is not None:
            row += range_of(strip.rows, strip.number, strip.count).start
        if not rows:
            before = col
        here = torch.arange(row, row - (-(col + one.elements.size) // cols))
        name = matrix.whole_name
        first = 0
        of_row = cols * parts
        if matrix.apart:
            name, first, of_row = _in_row(matrix, parameter)
        rows.append(here * of_row + crc32(name.encode()))
    width = cols // matrix.column_blocks
    numbers = torch.arange(cols)
    columns = numbers + (numbers // width * (parts - 1) + part) * width + first
    return Elements(torch.cat(rows).int().to(device), columns.int().to(device), before)


def _in_row(matrix: Matrix, parameter: Parameter) -> tuple[str, int, int]:
    """The name of all column ranges of a weight, a matrix's first column, and their
    number of columns. Where TP ranks hold some ranges each, these are one matrix a
    rank.
    """
    weight, _, ranges = matrix.whole_name.partition("[cols ")
    first = int(ranges.partition("..")[0])
    count = sum(one.units for one in parameter.matrices)
    of_unit = matrix.unit[1]
    return f"{weight}[cols 0..{count - 1}]", first * of_unit, count * of_unit


class InBf16(Packed[Elements]):
    """States with Muon's momentum in bf16."""

    _step = 0

    def begin(self) -> None:
        """See ``States``."""
        self._step = self.steps()

    def _size(self, shard: Tensor) -> int:
        return -(-shard.numel() // 2)

    def _unpacked(self, shard: Tensor, held: Tensor) -> Tensor:
        return held.view(torch.bfloat16)[: shard.numel()].float()

    def _pack(self, shard: Tensor, held: Tensor, wide: Tensor) -> None:
        bits = wide.view(torch.int32)
        rows, cols, before = self._places[id(shard)]
        start, seed = -before, crc32(self._step.to_bytes(8, "little")) - (1 << 31)
        for some in torch.split(rows + seed, max(1, AT_ONCE // len(cols))):
            low = max(start, 0)
            stop = min(start + len(some) * len(cols), bits.numel())
            chances = _hashed(some[:, None] + cols).view(-1)
            # a GPU's NaN, 0x7FFFFFFF, would be carried into the sign and become zero
            wide[low:stop].masked_fill_(wide[low:stop].isnan(), float("nan"))
            bits[low:stop].add_(chances[low - start : stop - start])
            start = stop
            del chances  # before the next ones are made
        held.view(torch.int16)[: shard.numel()].copy_(bits.bitwise_right_shift_(16))


def packed(optimizer: Any, muon: DistributedMuon) -> Packed[Any]:
    """The states of an Adam with ``muon`` in it, by ``momentum_dtype``."""
    ids = {index: id(shard) for index, shard in muon.main_params.items()}
    if muon.config.momentum_dtype == "int8":
        return InBlocks(
            optimizer, {ids[at]: span.start for at, span in muon.own.shards.items()}
        )
    mine = (one for one in muon.plan.slices if one.rank == muon.own.rank)
    places = {
        shard: _numbered(muon.plan, [*slices], muon.exchange.device)
        for shard, slices in groupby(mine, key=lambda one: ids[one.parameter])
    }
    return InBf16(optimizer, places)


def _hashed(numbers: Tensor) -> Tensor:
    """From 0 to 65,535: the upper half after two products and a shift; overwrites
    int32.
    """
    hashed = numbers.mul_(0x7FEB352D)
    hashed.bitwise_xor_((hashed >> 16).bitwise_and_(0xFFFF)).mul_(
        0x846CA68B - (1 << 32)
    )
    return hashed.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
