"""Which unit of its matrix each element of a round's slices belongs to.

Slices have parts of several units only where units are ranges of columns
(``Matrix.units``): their elements alternate row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rounds.rank_plan import RankPlan
from megatron_muon.planning.rounds.table import RoundTable


class SliceUnits:
    """The units of one round's slices on one rank, numbered as in ``table``.

    Attributes:
        matrices: the matrix of each slice.
        most: the most units that a matrix of the plan has.
    """

    def __init__(self, plan: ExchangePlan, own: RankPlan, table: RoundTable) -> None:
        self.matrices = [plan.matrices[matrix] for matrix in table.matrices]
        self.most = max((matrix.units for matrix in plan.matrices), default=1)
        here = {index for index, _ in table.parameters}
        mine = [
            one for one in plan.slices if one.rank == own.rank and one.parameter in here
        ]
        order = {index: at for at, (index, _) in enumerate(table.parameters)}
        mine.sort(key=lambda one: (order[one.parameter], one.elements))
        # where each slice begins in its matrix's staging order
        self._starts = [one.start for one in mine]

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
