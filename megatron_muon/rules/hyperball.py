"""Hyperball: Muon's direction on a sphere, so that no weight decay is needed.

W ← R · normalize(W - lr · R · normalize(D)), where D is Muon's direction
(``rules.muon``) and R a unit's radius: the Frobenius norm that it had when the rule
began, or a given one. A unit is what is orthogonalized alone: a matrix, a head, an
expert. So lr is the length of a step in radii (MuonH, arXiv 2606.16899; hyperball in
NVIDIA's Emerging-Optimizers).

Both norms are sums over all slices of a matrix. One sum has what they take::

    ww, wd, dd = sums of W², W·D, D²
    step = lr · R / √dd
    keep = R / √(ww - 2 · step · wd + step² · dd)
    W ← keep · W - keep · step · D

A norm below ``LEAST_NORM`` counts as zero, and zero normalized is zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_muon.planning.rounds.table import RoundTable
from megatron_muon.rules.muon import Muon
from megatron_muon.rules.slice_units import UnitRound
from megatron_muon.runtime.engine import Engine, ParamGroups
from megatron_muon.runtime.exchange.sharers import Sharers
from megatron_muon.runtime.rule import Shard, cut_into_slices, put_back
from megatron_muon.runtime.states import MAIN_KEY, States

LEAST_NORM = 1e-15
Radii = dict[str, float]  # by ``Matrix.unit_names``


class Hyperball(Muon):
    """The rule for the matrices of one stage.

    Args:
        numerics, plan, meter, own, device, elementwise: see ``Muon``.

    Attributes:
        radii: ``(matrices of the plan, units)`` fp32 on the device, NaN until
            ``set_radii``.
    """

    asks_after = True

    def __init__(self, *of_muon: Any) -> None:
        super().__init__(*of_muon)
        matrices = self.plan.matrices
        units = max((matrix.units for matrix in matrices), default=1)
        self.radii = torch.full((len(matrices), units), torch.nan, device=self.device)

    @property
    def kind_of_round(self) -> type[HyperballRound]:
        """See ``Muon``."""
        return HyperballRound

    def set_radii(self, radii: Radii) -> None:
        """Take each unit's radius."""
        values = torch.full(self.radii.shape, torch.nan)
        for index, matrix in enumerate(self.plan.matrices):
            of_units = [radii[name] for name in matrix.unit_names]
            # what an orthogonal direction of full rank is multiplied by
            self.scales[index] = _root_mean(of_units) / math.sqrt(min(matrix.whole))
            values[index, : len(of_units)] = torch.tensor(of_units)
        self.radii.copy_(values)


class HyperballRound(UnitRound):
    """Hyperball's work in one round on one rank."""

    def __init__(
        self,
        rule: Hyperball,
        table: RoundTable,
        sharers: Mapping[tuple[int, ...], Sharers],
    ) -> None:
        super().__init__(rule, table, sharers)
        self._rule = rule
        index = torch.tensor(table.matrices, dtype=torch.int64)
        self._matrix_of = index.to(rule.radii.device)
        # the slices' directions and the main parameters, from after_scatter to finish
        self._directions: list[Tensor] = []
        self._params: list[Tensor] = []

    def after_scatter(self, shards: Sequence[Shard], results: list[Tensor]) -> None:
        """Keep the directions and main parameters for the sums; ``finish`` updates."""
        self._directions = results
        self._params = [each.main_param for each in shards]

    def numbers_after(self, shards: Sequence[Shard]) -> Tensor:
        """W², W·D and D² of each slice, ``(slices, 3 · units)`` fp32."""
        weights = cut_into_slices(self._params, self._table)
        return self._by_unit(weights, self._directions)

    def squares(self, shards: Sequence[Shard]) -> Tensor:
        """W² of each slice, ``(slices, units)``."""
        params = [each.main_param for each in shards]
        return self._by_unit(cut_into_slices(params, self._table))

    def finish(self, shards: Sequence[Shard], sums: Tensor) -> None:
        """Update the shards by the formula above.

        A matrix whose sums are not finite stays, all units of it: where only one unit's
        direction is not finite, a slice may have no mark.
        """
        directions = self._directions
        params = self._params
        self._directions = []
        self._params = []
        if not directions:
            return
        sound = sums.isfinite().all(dim=1, keepdim=True)
        ww, wd, dd = sums.view(len(directions), 3, -1).unbind(1)
        radius = self._rule.radii.index_select(0, self._matrix_of)
        norm = dd.sqrt()
        step = torch.where(norm > LEAST_NORM, radius / norm, 0.0)
        torch._foreach_mul_(list(step.unbind()), self._rates(shards))
        squares = (ww - 2.0 * step * wd + step * step * dd).clamp_min(0.0)
        norm = squares.sqrt()
        keep = torch.where(norm > LEAST_NORM, radius / norm, 0.0)
        factor = torch.where(sound, keep * step, 0.0)
        keep = torch.where(sound, keep, 1.0)
        weights = cut_into_slices(params, self._table)
        self._blend(weights, directions, keep, factor)
        put_back(shards, MAIN_KEY, params)

    def _rates(self, shards: Sequence[Shard]) -> list[float]:
        """The learning rate of each slice."""
        rates: list[float] = []
        for each, (_, sizes) in zip(shards, self._table.parameters, strict=True):
            rates += [each.lr] * len(sizes)
        return rates


def norms_at_start(engine: Engine, groups: ParamGroups, states: States) -> Radii:
    """The Frobenius norms of units of matrices with a slice here.

    Every rank of the stage calls it; the host waits for the device in each round.
    """
    found: Radii = {}
    squares = HyperballRound.squares
    for round, sums in engine.over_matrices(groups, states, squares):
        norms = sums.sqrt().tolist()
        for index, of_units in zip(round.matrices, norms, strict=True):
            # of fewer units, the last ones are padding
            names = engine.plan.matrices[index].unit_names
            found |= zip(names, of_units, strict=False)
    return found


def _root_mean(numbers: Sequence[float]) -> float:
    return math.hypot(*numbers) / math.sqrt(len(numbers))
