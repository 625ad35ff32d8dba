"""AdaMuon (arXiv 2507.11005, algorithm 1): the signs of the momentum are
orthogonalized, and each element of their direction is divided by the root of its own
second moment.

With X the direction of sign(U), and V a state of the shard, elementwise::

    V ← β2·V + (1 - β2)·X²
    Y = X / (√V + ε)
    W ← (1 - lr·λ)·W - lr·scale·√min(m, n)·Y / ‖Y‖

So the root mean square of an update is exactly what Muon's scale promises. ‖Y‖ is of
each unit, a sum over all slices of its matrix. V starts at zero without a correction,
since a factor of V changes nothing. U has Nesterov's form unless ``nesterov`` is off;
the paper's is M.

The rule ``adaptive_adamuon`` is Megatron's ``adaptive_muon`` with this method, by
Emerging-Optimizers
(https://github.com/NVIDIA-NeMo/Emerging-Optimizers/blob/925e1bfe32b37f5e3d52afdbeb24cfaf2df85c00/emerging_optimizers/orthogonalized_optimizers/adaptive_muon.py):
X is the direction of U, without signs, and Y has no norm of its own::

    W ← (1 - lr·λ)·W - lr·scale·X / (√V + ε)

The scale is that of the whole weight, also where QKV is orthogonalized in parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_muon.planning.rounds.table import RoundTable
from megatron_muon.rules.muon import MOMENT2_KEY, Muon, at_once
from megatron_muon.rules.slice_units import UnitRound
from megatron_muon.runtime.exchange.sharers import Sharers
from megatron_muon.runtime.rule import Shard, cut_into_slices, put_back


class AdaMuon(Muon):
    """The rule for the matrices of one stage.

    Args:
        numerics, plan, meter, own, device, elementwise: see ``Muon``.
    """

    states_after = (MOMENT2_KEY,)
    asks_after = True

    @property
    def kind_of_round(self) -> type[AdaMuonRound]:
        """See ``Muon``."""
        return AdaMuonRound


class AdaMuonRound(UnitRound):
    """AdaMuon's work in one round on one rank."""

    def __init__(
        self,
        rule: AdaMuon,
        table: RoundTable,
        sharers: Mapping[tuple[int, ...], Sharers],
    ) -> None:
        super().__init__(rule, table, sharers)
        config = rule.numerics.config
        self._beta2, self._eps = config.moment2_beta2, config.moment2_eps
        # from after_scatter to finish: directions, fp32, and second moments
        self._directions: list[Tensor] = []
        self._moments: list[Tensor] = []

    def before_gather(
        self,
        shards: Sequence[Shard],
        into: Sequence[Tensor | None],
        moves: Tensor,
        sums: Tensor | None = None,
    ) -> None:
        """As Muon does, with the signs of U; what is not finite stays so."""
        super().before_gather(shards, into, moves, sums)
        if self._muon.of_weights:
            return
        sent = [target for target in into if target is not None]
        for _, (targets,) in at_once(sent) if sent else ():
            zeros = torch._foreach_mul(targets, 0.0)  # the sign of NaN is 0
            torch._foreach_sign_(targets)
            torch._foreach_add_(targets, zeros)

    def after_scatter(self, shards: Sequence[Shard], results: list[Tensor]) -> None:
        """Keep the directions and second moments for the sums; ``finish`` updates."""
        self._directions = [result.float() for result in results]
        self._moments = [each.state(MOMENT2_KEY) for each in shards]

    def numbers_after(self, shards: Sequence[Shard]) -> Tensor:
        """Y² of each slice by unit, ``(slices, units)`` fp32."""
        moments = cut_into_slices(self._moments, self._table)
        rows = [
            self._units.sums(number, self._squares(x, moment))
            for number, (x, moment) in enumerate(
                zip(self._directions, moments, strict=True)
            )
        ]
        if not rows:
            return torch.zeros(0, self._units.most, device=self._device)
        return torch.stack(rows)

    def _squares(self, x: Tensor, moment: Tensor) -> Tensor:
        """Y² of each element; the moment stays."""
        after = moment.lerp(x.square(), 1.0 - self._beta2)
        return (x / after.sqrt_().add_(self._eps)).square_()

    def finish(self, shards: Sequence[Shard], sums: Tensor) -> None:
        """Advance the second moments, and update the shards by the formula above.

        A matrix whose sums are not finite stays, all units of it, and so do the moments
        of a unit that is not moved.
        """
        directions = self._directions
        whole = self._moments
        self._directions = []
        self._moments = []
        sound = sums.isfinite().all(dim=1, keepdim=True)
        moves = sound & (sums > 0)
        ends = [math.sqrt(min(matrix.whole)) for matrix in self._units.matrices]
        if self._muon.of_weights:  # Y has the norm that it has
            sums = torch.ones_like(sums)
            ends = [1.0] * len(ends)
        factors = (1.0 / sums.sqrt()).where(moves, 0.0)
        factors = factors.where(sound, torch.nan)
        weights = torch.where(moves, 1.0 - self._beta2, 0.0)
        moments = cut_into_slices(whole, self._table)
        for number, (x, moment) in enumerate(zip(directions, moments, strict=True)):
            weight = self._units.spread(number, weights[number], x.numel())
            moment.lerp_(x.square().masked_fill_(weight == 0.0, 0.0), weight)
            factor = self._units.spread(number, factors[number], x.numel())
            x.div_(moment.sqrt().add_(self._eps)).mul_(factor).mul_(ends[number])
        super().after_scatter(shards, directions)
        put_back(shards, MOMENT2_KEY, whole)
