"""Emerging-Optimizers' ``AdaptiveMuon``, which Megatron's ``--optimizer adaptive_muon``
is, in its three forms: how each differs from its paper's rule is in docs/rules.md.

With G the gradient, U what is orthogonalized, X its direction, all of a whole weight,
and v zero at first, without corrections::

    adaptive_adamuon: v ← β2·v + (1 - β2)·X²                       Y = X / (√v + ε)
    adaptive_normuon: v ← β2·v + (1 - β2)·mean of X², short side   Z = X / √max(v, ε)
                                                                   Y = Z·‖X‖ / ‖Z‖
    adaptive_namo:    v ← β2·v + (1 - β2)·‖G‖²      Y = X·(1 - μ)·‖U‖ / (√v + ε)

    W ← (1 - lr·λ)·W - lr·scale·Y

(1 - μ)·U is its momentum, a mean. The scale is that of the weight, also where QKV is
orthogonalized in parts. So are the norms; normuon's parts may have several homes, so
there a weight is one matrix (``routing.by_pattern``).

Source: ``adaptive_muon.py`` of v0.3.0 to v0.4.0
(https://github.com/NVIDIA-NeMo/Emerging-Optimizers/blob/925e1bfe32b37f5e3d52afdbeb24cfaf2df85c00/emerging_optimizers/orthogonalized_optimizers/adaptive_muon.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from megatron_muon.rules.muon import MOMENT2_KEY, Muon, MuonRound
from megatron_muon.rules.namo import Namo, NamoRound
from megatron_muon.rules.normuon import NorMuon, NorMuonRound
from megatron_muon.runtime.rule import Shard, cut_into_slices


class AdaptiveAdaMuonRound(MuonRound):
    """The work of ``adaptive_adamuon`` in one round on one rank."""

    def after_scatter(self, shards: Sequence[Shard], results: list[Tensor]) -> None:
        """Advance v, and update the shards; both stay where a matrix is not finite."""
        config = self._numerics.config
        weight = 1.0 - config.moment2_beta2
        moments = [each.state(MOMENT2_KEY) for each in shards]
        directions = [result.float() for result in results]
        slices = cut_into_slices(moments, self._table)
        for x, moment in zip(directions, slices, strict=True):
            is_sound = x[0].isfinite()
            # without a name, so that the next slice's does not lie beside it
            moment.copy_(moment.lerp(x.square(), weight).where(is_sound, moment))
            x.div_(moment.sqrt().add_(config.moment2_eps))
        super().after_scatter(shards, directions)
        for each, moment in zip(shards, moments, strict=True):
            each.put(MOMENT2_KEY, moment)


class AdaptiveAdaMuon(Muon):
    """The rule ``adaptive_adamuon`` for the matrices of one stage: see ``Muon``."""

    states_after = (MOMENT2_KEY,)
    kind_of_round = AdaptiveAdaMuonRound


class AdaptiveNorMuonRound(NorMuonRound):
    """The work of ``adaptive_normuon`` in one round on one rank."""

    def _inverse(self, moment: Tensor) -> Tensor:
        return moment.clamp_min(self._numerics.config.moment2_eps).rsqrt()

    def _norm(self, squares: Tensor, short: int) -> Tensor:
        return squares.sqrt()


class AdaptiveNorMuon(NorMuon):
    """The rule ``adaptive_normuon`` for the matrices of one stage: see ``Muon``."""

    kind_of_round = AdaptiveNorMuonRound


class AdaptiveNamoRound(NamoRound):
    """The work of ``adaptive_namo`` in one round on one rank."""

    def _of_decay(self, alphas: Tensor, is_sound: Tensor) -> Tensor:
        return is_sound.float().expand_as(alphas)


class AdaptiveNamo(Namo):
    """The rule ``adaptive_namo`` for the matrices of one stage: see ``Muon``."""

    sums_parameters = True
    kind_of_round = AdaptiveNamoRound

    def start_step(self, steps: int) -> None:
        """See ``Rule``. Nothing is corrected, as after infinitely many steps."""
        self.steps = math.inf
        self.home_state.rows[..., 1] = 1.0
