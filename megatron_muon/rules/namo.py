"""NAMO (arXiv 2602.17080, algorithm 1): a matrix whose gradients are noisy is moved
less.

With G the gradient of a unit, U what is orthogonalized, X its direction, t the number
of steps, and v a number of the unit::

    v ← β2·v + (1 - β2)·‖G‖²
    α = √(1 - β2ᵗ) / (1 - μᵗ) · (1 - μ)·‖U‖ / (√v + ε)
    W ← (1 - lr·α·λ)·W - lr·α·scale·X

(1 - μ)·U is the paper's momentum, a mean, which has no Nesterov's form (``nesterov``
off); with it, μᵗ is μᵗ⁺¹. The authors' code
(https://github.com/minxin-zhg/namo/blob/344d11f983f851893c3af3a8588fce6ba24dd80b/src/namo.py)
keeps μᵗ there, and has β2 = 0.99. α is 1 where gradients are alike, and less where they
are noisy; an update has α times the root mean square that Muon's scale promises. t of
the momentum is Adam's number of steps; that of v counts the steps with v, which may
start later.

Both norms are sums over the slices of a matrix, of which each rank knows all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_muon.planning.rounds.table import RoundTable
from megatron_muon.rules.muon import MOMENTUM_KEY, Muon
from megatron_muon.rules.slice_units import UnitRound
from megatron_muon.runtime.exchange.sharers import Sharers
from megatron_muon.runtime.home_state import SliceState
from megatron_muon.runtime.rule import Shard, cut_into_slices
from megatron_muon.runtime.states import MAIN_KEY


class Namo(Muon):
    """The rule for the matrices of one stage.

    Args:
        numerics, plan, meter, own, device, elementwise: see ``Muon``.

    ``home_state`` has v and 1 - β2ᵗ of each unit.
    """

    asks_before = True

    def __init__(self, *of_muon: Any) -> None:
        super().__init__(*of_muon)
        self.home_state: SliceState = SliceState(
            self.plan, self.own.rank, 2, self.device
        )
        self.counts_steps = True
        self.steps = 0

    def start_step(self, steps: int) -> None:
        """See ``Rule``."""
        self.steps = steps + 1

    @property
    def kind_of_round(self) -> type[NamoRound]:
        """See ``Muon``."""
        return NamoRound


class NamoRound(UnitRound):
    """NAMO's work in one round on one rank."""

    def __init__(
        self,
        rule: Namo,
        table: RoundTable,
        sharers: Mapping[tuple[int, ...], Sharers],
    ) -> None:
        super().__init__(rule, table, sharers)
        self._rule = rule
        # of each slice, from before_gather to after_scatter: α of its units, and what
        # their numbers become
        self._alphas: list[Tensor] = []
        self._after: list[Tensor] = []

    def numbers_before(self, shards: Sequence[Shard]) -> Tensor:
        """G² and U² of each slice by unit, ``(slices, 2 · units)`` fp32."""
        momenta = [each.state(MOMENTUM_KEY) for each in shards]
        grads = [each.grad for each in shards]
        rows: list[Tensor] = []
        of_slices = zip(
            cut_into_slices(momenta, self._table),
            cut_into_slices(grads, self._table),
            self._mus(),
            strict=True,
        )
        for number, (momentum, grad, mu) in enumerate(of_slices):
            grad = grad.float()
            used = torch.add(grad, momentum, alpha=mu)
            if self._numerics.config.nesterov:
                used.mul_(mu).add_(grad)
            rows.append(self._units.sums(number, grad.square()))
            rows.append(self._units.sums(number, used.square_()))
        if not rows:
            return torch.zeros(0, 2 * self._units.most, device=self._device)
        return torch.stack(rows).view(-1, 2 * self._units.most)

    def before_gather(
        self,
        shards: Sequence[Shard],
        into: Sequence[Tensor | None],
        moves: Tensor,
        sums: Tensor | None = None,
    ) -> None:
        """As Muon does; α and the next v are found.

        Those of a matrix with a number that is not finite, or without a gradient, stay.
        """
        super().before_gather(shards, into, moves, sums)
        assert sums is not None
        self._alphas = []  # a step that failed may have left some
        self._after = []
        config = self._numerics.config
        for number, (row, mu) in enumerate(zip(sums, self._mus(), strict=True)):
            matrix = self._units.matrices[number]
            grads, useds = row.view(2, -1)[:, : matrix.units]
            moves = row.isfinite().all() & (grads > 0)
            before = self._rule.home_state.of(self._table.matrices[number])
            news = torch.stack([grads, torch.ones_like(grads)], dim=1)
            after = before.lerp(news, 1.0 - config.moment2_beta2)
            after = after.where(moves[:, None], before)
            v, corrects = after.unbind(1)
            # the weights of all gradients in U add up to this
            weight = 1.0 - mu ** (self._rule.steps + config.nesterov)
            alpha = corrects.sqrt() * useds.sqrt() / (v.sqrt() + config.moment2_eps)
            self._alphas.append(alpha.where(moves, 0.0).mul_((1.0 - mu) / weight))
            self._after.append(after)

    def after_scatter(self, shards: Sequence[Shard], results: list[Tensor]) -> None:
        """Keep v, and update the shards by the formula above."""
        alphas, after = self._alphas, self._after
        if not results:
            return
        scales = iter(self._scales)
        factors: list[Tensor] = []
        keeps: list[Tensor] = []
        numbers = iter(range(len(results)))
        for each, (_, sizes) in zip(shards, self._table.parameters, strict=True):
            for _ in sizes:
                number = next(numbers)
                is_sound = results[number][0].isfinite()
                state = self._rule.home_state.of(self._table.matrices[number])
                state.copy_(after[number].where(is_sound, state))
                alpha = alphas[number].where(is_sound, 0.0)
                padded = alpha.new_zeros(self._units.most)
                padded[: len(alpha)] = alpha
                factors.append(padded * (each.lr * next(scales)))
                keeps.append(1.0 - padded * (each.lr * each.weight_decay))
        params = [each.main_param for each in shards]
        slices = cut_into_slices(params, self._table)
        self._blend(slices, results, torch.stack(keeps), torch.stack(factors))
        for each, param in zip(shards, params, strict=True):
            each.put(MAIN_KEY, param)

    def _mus(self) -> list[float]:
        """μ of each slice in this step."""
        configs = [self._muon.configs[matrix] for matrix in self._table.matrices]
        return [config.momentum for config in configs]
