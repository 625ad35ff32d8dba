"""NorMuon (arXiv 2510.05491, algorithm 1): neurons whose directions were large for some
time are moved less.

At its home each unit's direction X, ``(m, n)``, is divided by the root of a second
moment v of its long side's rows or columns, and gets the Frobenius norm of an
orthogonal matrix again::

    s = mean of X² over the short side
    v ← β2·v + (1 - β2)·s
    Y = X / (√v + ε)
    X ← √min(m, n) · Y / ‖Y‖

So the root mean square of an update is exactly what Muon's scale promises. v starts at
zero without a correction, since a factor of v changes nothing.

The paper and its code
(https://github.com/zichongli5/NorMuon/blob/e5aaaf42fac9f466b973d6cad3dea033cdf4e370/normuon.py)
have v of rows, also where they are the short side; orthogonal rows all have
the same norm. Here the long side has it, as in Emerging-Optimizers' ``AdaptiveMuon``
and in the record of modded-nanogpt; so a weight's transpose is updated alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_muon.orthogonalize.matmul import TORCH_DTYPE
from megatron_muon.orthogonalize.normalization import Soundness
from megatron_muon.planning.rounds.table import RoundTable, Stack
from megatron_muon.rules.muon import Muon, MuonRound, units_of
from megatron_muon.runtime.exchange.sharers import Sharers
from megatron_muon.runtime.home_state import HomeState


class NorMuon(Muon):
    """The rule for the matrices of one stage.

    Args:
        numerics, plan, meter, own, device, elementwise: see ``Muon``.

    ``home_state`` is v.
    """

    def __init__(self, *of_muon: Any) -> None:
        super().__init__(*of_muon)
        self.home_state: HomeState = HomeState(
            self.plan.matrices, self.own.rank, self.device, least=0.0
        )

    @property
    def kind_of_round(self) -> type[NorMuonRound]:
        """See ``Muon``."""
        return NorMuonRound


class NorMuonRound(MuonRound):
    """NorMuon's work in one round on one rank."""

    def __init__(
        self,
        rule: NorMuon,
        table: RoundTable,
        sharers: Mapping[tuple[int, ...], Sharers],
    ) -> None:
        super().__init__(rule, table, sharers)
        self._moments = rule.home_state

    def _orthogonalize_stack(
        self, stack: Stack, elements: Tensor, moves: Tensor, soundness: Soundness
    ) -> None:
        """See ``MuonRound``; each direction is normalized."""
        known = len(soundness.lines)
        super()._orthogonalize_stack(stack, elements, moves, soundness)
        lines = torch.cat(soundness.lines[known:])
        layout = stack.layout
        stop = stack.start + len(stack.matrices) * layout.numel
        staged = elements[stack.start : stop]
        directions = staged.view(TORCH_DTYPE[self._numerics.dtype])
        of_matrices = zip(*units_of(directions, layout), strict=True)
        for index, line, units in zip(stack.matrices, lines, of_matrices, strict=True):
            for unit, moment in zip(units, self._moments.of(index), strict=True):
                self._normalize([unit], [moment], layout.unit, line)

    def _orthogonalize_shared(
        self,
        stack: Stack,
        strips: Sequence[Tensor],
        moves: Tensor,
        soundness: Soundness,
    ) -> None:
        """See ``MuonRound``; the matrix's direction is normalized by all homes."""
        super()._orthogonalize_shared(stack, strips, moves, soundness)
        directions = [one.view(TORCH_DTYPE[self._numerics.dtype]) for one in strips]
        moments = [self._moments.of(index)[0] for index in stack.matrices]
        self._normalize(
            directions,
            moments,
            stack.layout.whole,
            soundness.lines[-1][0],
            self._sharers[stack.matrices],
        )

    def _normalize(
        self,
        parts: Sequence[Tensor],
        moments: Sequence[Tensor],
        whole: tuple[int, int],
        line: Tensor,
        sharers: Sharers | None = None,
    ) -> None:
        """Normalize a unit's direction in place, and advance its second moment.

        Both stay where the direction is zero or not finite.

        Args:
            parts: ranges of its long side that are here; each has rows as its first
                dim, and columns as its other ones.
            moments: v of each of them.
            whole: rows and columns of the unit.
            line: a number that is not finite where the direction is not (``Findings``).
            sharers: the homes that have its other parts, if any.
        """
        config = self._numerics.config
        is_tall, short = whole[0] >= whole[1], min(whole)
        squares = [_squares(part, is_tall) for part in parts]
        moved = _sum([one.sum() for one in squares], sharers)
        moves = (moved > 0) & (moved + line < math.inf)  # no NaN is
        inverses: list[Tensor] = []
        for moment, square in zip(moments, squares, strict=True):
            mean = (square / short).where(moves, moment)
            moment.lerp_(mean, 1.0 - config.moment2_beta2)
            inverses.append(1.0 / (moment.sqrt() + config.moment2_eps))
        sums = [
            (inverse.square() * square).sum()
            for inverse, square in zip(inverses, squares, strict=True)
        ]
        norm = _sum(sums, sharers).sqrt()
        for part, inverse in zip(parts, inverses, strict=True):
            factor = (inverse * (math.sqrt(short) / norm)).where(moves, 1.0)
            across = [1] * (part.dim() - 1)
            part.mul_(
                factor.view(-1, *across) if is_tall else factor.view(part[0].shape)
            )


def _squares(part: Tensor, is_tall: bool) -> Tensor:
    """Sums of squares over the short side, ``(long side,)`` fp32."""
    dims = tuple(range(1, part.dim())) if is_tall else 0
    norms: Tensor = torch.linalg.vector_norm(part, dim=dims, dtype=torch.float32)
    return norms.square().flatten()


def _sum(numbers: Sequence[Tensor], sharers: Sharers | None) -> Tensor:
    """The sum of scalars of all parts of a unit."""
    if sharers is None:
        return numbers[0]
    return sharers.all_numbers(torch.stack(list(numbers))[:, None]).sum()
