"""Which unit of its matrix each element of a round's slices belongs to, and sums by
unit.

Slices have parts of several units only where units are ranges of columns
(``Matrix.units``): their elements alternate row by row.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rounds.table import RoundTable
from megatron_muon.rules.muon import Muon, MuonRound, at_once, in_fp32
from megatron_muon.runtime.exchange.sharers import Sharers


class SliceUnits:
    """The units of one round's slices on one rank, numbered as in ``table``.

    Attributes:
        matrices: the matrix of each slice.
        most: the most units that a matrix of the plan has.
    """

    def __init__(self, plan: ExchangePlan, table: RoundTable) -> None:
        self.matrices = [plan.matrices[matrix] for matrix in table.matrices]
        self.most = max((matrix.units for matrix in plan.matrices), default=1)
        # where each slice begins in its matrix's staging order
        self._starts = [one.start for one in table.slices]

    def sums(self, number: int, products: Tensor) -> Tensor:
        """The sum of a slice's numbers by unit, ``(most,)``, padded with zeros."""
        matrix = self.matrices[number]
        made = products.new_zeros(self.most)
        if matrix.units == 1:
            made[0] = products.sum()
            return made
        row = matrix.cols // matrix.column_parts
        lead = self._starts[number] % row
        padding = lead, -(lead + products.numel()) % row
        rows = torch.nn.functional.pad(products, padding)
        in_units = rows.view(-1, matrix.units, row // matrix.units)
        made[: matrix.units] = in_units.sum(dim=(0, 2))
        return made

    def spread(self, number: int, of_units: Tensor, size: int) -> Tensor:
        """The number of each element's unit, ``(size,)``; a scalar where there is one
        unit.
        """
        matrix = self.matrices[number]
        if matrix.units == 1:
            return of_units[0]
        row = matrix.cols // matrix.column_parts
        of_row = of_units[: matrix.units].repeat_interleave(row // matrix.units)
        shifted = of_row.roll(-(self._starts[number] % row))
        return shifted.repeat(-(-size // row))[:size]


class UnitRound(MuonRound):
    """Muon's work in a round of a rule with numbers of each unit."""

    def __init__(
        self,
        rule: Muon,
        table: RoundTable,
        sharers: Mapping[tuple[int, ...], Sharers],
    ) -> None:
        super().__init__(rule, table, sharers)
        self._units, self._device = SliceUnits(rule.plan, table), rule.device
        matrices = self._units.matrices
        # slices of matrices that are one unit, and of others
        self._whole = [at for at, one in enumerate(matrices) if one.units == 1]
        self._parts = [at for at, one in enumerate(matrices) if one.units > 1]
        self._wholes = torch.tensor(self._whole, dtype=torch.int64, device=rule.device)

    def _blend(
        self,
        weights: Sequence[Tensor],
        directions: Sequence[Tensor],
        keep: Tensor,
        factor: Tensor,
    ) -> None:
        """W ← keep · W - factor · D of each slice, by unit."""
        if self._whole:
            self._elementwise.blend(
                [weights[number] for number in self._whole],
                [directions[number] for number in self._whole],
                keep[:, 0].index_select(0, self._wholes),
                factor[:, 0].index_select(0, self._wholes),
            )
        for number in self._parts:
            weight = weights[number]
            keeps = self._units.spread(number, keep[number], weight.numel())
            factors = self._units.spread(number, factor[number], weight.numel())
            update = directions[number].float() * factors
            weight.mul_(keeps).sub_(update.masked_fill_(factors == 0.0, 0.0))

    def _by_unit(self, *lists: Sequence[Tensor]) -> Tensor:
        """Sums of A², A·B and B² of each slice by unit, padded with zeros.

        Args:
            lists: A, fp32, and B of each slice; or A alone, for A².

        Returns:
            ``(slices, 3 · units)``, or ``(slices, units)``, fp32.
        """
        count = 3 if len(lists) == 2 else 1
        shape = len(self._units.matrices), count, self._units.most
        made = torch.zeros(shape, device=self._device)
        if self._whole:
            of_whole = [[one[number] for number in self._whole] for one in lists]
            made[:, :, 0].index_copy_(0, self._wholes, _sums(*of_whole))
        for number in self._parts:
            some = [one[number].float() for one in lists]
            pairs = itertools.combinations_with_replacement(some, 2)
            for at, (one, other) in enumerate(pairs):
                made[number, at] = self._units.sums(number, one * other)
        return made.flatten(1)


def _sums(tensors: Sequence[Tensor], *others: Sequence[Tensor]) -> Tensor:
    """A², A·B and B² of each slice, ``(slices, 3)`` fp32; A² without B.

    Args:
        tensors: A of each slice, ``(n,)`` fp32.
        others: B of the slices, if any, each ``(n,)``.
    """
    width = 3 if others else 1
    found: list[list[Tensor]] = [[] for _ in tensors]
    for numbers, parts_of in at_once(tensors, *others):
        columns = _of_parts(*parts_of)
        for number, of_part in zip(numbers, zip(*columns, strict=True), strict=True):
            found[number] += of_part
    flat = list(itertools.chain.from_iterable(found))
    parts = torch.stack(flat).view(-1, width)
    parts[:, ::2].square_()  # norms
    if len(parts) == len(found):
        return parts
    counts = [len(of_slice) // width for of_slice in found]
    of_slices = torch.split(parts, counts)
    return torch.stack([each.sum(dim=0) for each in of_slices])


def _of_parts(
    tensors: list[Tensor], others: list[Tensor] | None = None
) -> list[Sequence[Tensor]]:
    """‖A‖, A·B and ‖B‖ of each; ‖A‖ alone without B."""
    norms = torch._foreach_norm(tensors)
    if others is None:
        return [norms]
    wide = in_fp32(others)
    products = torch._foreach_mul(tensors, wide)
    return [norms, [each.sum() for each in products], torch._foreach_norm(wide)]
