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

Both norms are sums over the slices of a matrix, of which each rank knows all. Where a
square leaves fp32's range (a norm of 1e19), α is not known: the matrix stays, and its
direction counts as one that is not finite. Below 1e-22 squares are 0. Far above that ε
has stopped a matrix already, unless its momentum is larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_muon.orthogonalize.normalization import Soundness
from megatron_muon.planning.rounds.table import RoundTable
from megatron_muon.rules.muon import MOMENTUM_KEY, Muon, nonzeros
from megatron_muon.rules.slice_units import UnitRound
from megatron_muon.runtime.exchange.messages import Staged
from megatron_muon.runtime.exchange.sharers import Sharers
from megatron_muon.runtime.home_state import SliceState
from megatron_muon.runtime.rule import Shard, cut_into_slices, put_back
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
            self.plan, self.own.rank, 2, self.device, least=0.0
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
        rows = [rule.home_state.row_of[matrix] for matrix in table.matrices]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=rule.device)
        outgoing = table.outgoing
        self._outgoing = torch.tensor(outgoing, dtype=torch.int64, device=rule.device)
        self._mus = [rule.configs[matrix].momentum for matrix in table.matrices]
        # U is a·G + b·M: b², 2·a·b and a² of each slice, ``(slices, 3, 1)``
        mus = torch.tensor(self._mus, device=rule.device)
        nesterov = rule.numerics.config.nesterov
        a = 1.0 + mus if nesterov else torch.ones_like(mus)
        b = mus * mus if nesterov else mus
        self._of_used = torch.stack([b * b, 2.0 * a * b, a * a], dim=1)[..., None]
        # from before_gather to after_scatter: α of each slice's units, ``(slices,
        # units)``, and what v and 1 - β2ᵗ become, ``(slices, units, 2)``
        self._alphas = torch.empty(0)
        self._after = torch.empty(0)

    def numbers_before(self, shards: Sequence[Shard]) -> Tensor:
        """M², M·G and G² of each slice by unit, with M before this step, and a number
        that is 0 where G is: ``(slices, 4 · units)`` fp32.
        """
        momenta = [each.state(MOMENTUM_KEY) for each in shards]
        grads = cut_into_slices([each.grad for each in shards], self._table)
        sums = self._by_unit(cut_into_slices(momenta, self._table), grads)
        return torch.cat([sums, self._nonzeros(grads)], dim=1)

    def before_gather(
        self,
        shards: Sequence[Shard],
        into: Sequence[Tensor | None],
        moves: Tensor,
        sums: Tensor | None = None,
    ) -> None:
        """As Muon does; α and the next v are found.

        Those of a matrix with a number that is not finite, or without a gradient, stay.
        The flag of the former is infinite.
        """
        super().before_gather(shards, into, moves, sums)
        assert sums is not None
        if not self._table.matrices:
            return
        config = self._numerics.config
        numbers = sums.view(len(sums), 4, -1)
        useds = (numbers[:, :3] * self._of_used).sum(dim=1).clamp_min(0.0)
        grads = numbers[:, 2]
        known = torch.cat([sums, useds], dim=1).isfinite().all(dim=1, keepdim=True)
        acts = known & (numbers[:, 3] > 0)
        moves.masked_fill_(~known[:, 0].index_select(0, self._outgoing), math.inf)
        before = self._rule.home_state.rows.index_select(0, self._rows)
        news = torch.stack([grads, torch.ones_like(grads)], dim=2)
        # two products, not lerp, whose bits may depend on a number's place
        after = before * config.moment2_beta2 + news * (1.0 - config.moment2_beta2)
        self._after = after.where(acts[..., None], before)
        v, corrects = self._after.unbind(2)
        self._alphas = corrects.sqrt() * useds.sqrt() / (v.sqrt() + config.moment2_eps)
        self._alphas = self._alphas.where(acts, 0.0)
        # the weights of all gradients in U add up to 1 - μᵗ over 1 - μ
        steps = self._rule.steps + config.nesterov
        means = [(1.0 - mu) / (1.0 - mu**steps) for mu in self._mus]
        torch._foreach_mul_(list(self._alphas.unbind()), means)

    def at_home(self, staged: Staged) -> Soundness:
        """See ``MuonRound``; a direction whose α is not known counts as not finite."""
        soundness = super().at_home(staged)
        if staged.stacks:
            unknown = torch.where(staged.flags.isinf(), torch.nan, 0.0)
            soundness.lines[:] = [torch.cat(soundness.lines) + unknown]
        return soundness

    def after_scatter(self, shards: Sequence[Shard], results: list[Tensor]) -> None:
        """Keep v, and update the shards by the formula above."""
        if not results:
            return
        state = self._rule.home_state.rows
        marks = torch.stack([result[0] for result in results])
        is_sound = marks.isfinite()[:, None]
        before = state.index_select(0, self._rows)
        state.index_copy_(0, self._rows, self._after.where(is_sound[..., None], before))
        alphas = self._alphas.where(is_sound, 0.0)
        factors, decays = self._factors_and_decays(shards)
        factor = _by_slice(alphas, factors)
        keep = 1.0 - _by_slice(alphas, decays)
        params = [each.main_param for each in shards]
        slices = cut_into_slices(params, self._table)
        self._blend(slices, results, keep, factor)
        put_back(shards, MAIN_KEY, params)

    def _nonzeros(self, grads: Sequence[Tensor]) -> Tensor:
        """A number of each slice by unit, ``(slices, units)``: 0 where its gradient is
        zero. Squares of small numbers are zero, too.
        """
        shape = len(grads), self._units.most
        made = torch.zeros(shape, device=self._device)
        if self._whole:
            found = nonzeros([grads[number] for number in self._whole])
            made[:, 0].index_copy_(0, self._wholes, found.float())
        for number in self._parts:
            is_nonzero = grads[number].ne(0).float()
            made[number] = self._units.sums(number, is_nonzero)
        return made


def _by_slice(numbers: Tensor, factors: list[float]) -> Tensor:
    """``(slices, units)`` times each slice's factor, which the host has."""
    return torch.stack(list(torch._foreach_mul(list(numbers.unbind()), factors)))
