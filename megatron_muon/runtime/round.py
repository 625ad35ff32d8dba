"""One round of a step: its matrices come to their homes, become directions, go back as updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, cat, split_with_sizes

from megatron_muon.orthogonalize.matmul import TORCH_DTYPE
from megatron_muon.orthogonalize.newton_schulz import at_once_on, orthogonalize_staged
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.orthogonalize.soundness import Soundness
from megatron_muon.orthogonalize.strips import orthogonalize_strips
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rounds.cut import scratch_limit
from megatron_muon.planning.rounds.table import Alike, RoundTable
from megatron_muon.runtime.exchange.messages import (
    Gathering,
    Leaving,
    RoundExchange,
    Scattering,
    Staged,
)
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.states import MAIN_KEY, MOMENTUM_KEY, States
from megatron_muon.runtime.tracing import Phase
from megatron_muon.runtime.update import Elementwise, update_scale


@dataclass(frozen=True, slots=True)
class Shard:
    """A Muon parameter's shard on this rank in this step, and its group's settings."""

    shard: Tensor
    states: States
    lr: float
    weight_decay: float

    @property
    def main_param(self) -> Tensor:
        """Flat, fp32; a copy where ``states`` says so."""
        return self.states.get(self.shard, MAIN_KEY)

    @property
    def momentum_buffer(self) -> Tensor:
        """Like the main parameter."""
        return self.states.get(self.shard, MOMENTUM_KEY)

    @property
    def grad(self) -> Tensor:
        """Checked before the step."""
        grad = self.states.grad(self.shard)
        assert grad is not None
        return grad


Shards = Mapping[int, Shard]  # by the parameter's index in the plan


@dataclass(frozen=True, slots=True)
class StepTools:
    """Settings and tools that all rounds of a rank share."""

    numerics: Numerics  # of the run
    flops: Sequence[int]  # Newton-Schulz flops of each matrix of the plan
    scales: Sequence[float]  # scale of each matrix, per unit of lr (update_scale)
    scratch: int  # elements of scratch memory for one batch (rounds.cut.scratch_limit)
    meter: Meter  # counts the work done
    phase: Phase  # names the parts of a step

    @staticmethod
    def of(plan: ExchangePlan, numerics: Numerics, meter: Meter, phase: Phase) -> StepTools:
        """For a stage's plan."""
        scales = [update_scale(*matrix.whole, numerics.config) for matrix in plan.matrices]
        scratch = scratch_limit(plan.matrices)
        return StepTools(numerics, plan.flops, scales, scratch, meter, phase)


class Observer(Protocol):
    """Sees what a logging step's rounds compute, and changes none of it."""

    def before_newton_schulz(self, staged: Staged) -> None:
        """Matrices at their home, before they become directions."""

    def before_update(
        self, table: RoundTable, shards: Shards, directions: Sequence[Tensor]
    ) -> None:
        """The directions of the slices that are held here, before the shards are updated."""


class Round:
    """A round on one rank: ``start`` it, ``orthogonalize``, ``start_scatter``, ``finish`` it.

    Between two of these calls, other rounds are at work while this one's messages travel. Each
    call frees the memory that no later call needs.

    Args:
        exchange: moves its slices and directions.
        work: settings and tools of all rounds.
        elementwise: does momentum and update.

    Attributes:
        homes: the matrices whose home this rank is.
        parameters: the plan's indices of those with a shard here.
        travels: this rank sends or receives slices or directions in this round.
        observer: sees this step's matrices and updates; None except in a logging step.
    """

    def __init__(self, exchange: RoundExchange, work: StepTools, elementwise: Elementwise) -> None:
        self._exchange, self._work, self._elementwise = exchange, work, elementwise
        self._table = exchange.table
        self.homes, self.travels = self._table.homes, self._table.travels
        self.parameters = [index for index, _ in self._table.parameters]
        self.observer: Observer | None = None
        self._numbers: tuple[list[Tensor], Tensor] | None = None
        self._gathering: Gathering | None = None
        self._scattering: Scattering | None = None

    def start(self, shards: Shards) -> None:
        """Advance the momentum of the shards, and send Newton-Schulz's input to its homes."""
        with self._work.phase("muon/momentum"):
            leaving = self._exchange.leaving()
            self._advance_momentum(shards, leaving)
        with self._work.phase("muon/gather"):
            self._gathering = self._exchange.start_gather(leaving)

    def finish_gather(self) -> Staged:
        """Wait for the matrices whose home this rank is."""
        gathering, self._gathering = self._gathering, None
        assert gathering is not None, "a round that was not started"
        with self._work.phase("muon/gather"):
            return self._exchange.finish_gather(gathering)

    def orthogonalize(self, staged: Staged) -> None:
        """Turn matrices into directions, in place; those that are not finite are marked."""
        if self.observer is not None:
            self.observer.before_newton_schulz(staged)
        with self._work.phase("muon/newton_schulz"):
            first, found = 0, Soundness()
            for alike in staged.alike:
                moves = staged.moves[first : first + len(alike.matrices)]
                one_way = self._orthogonalize_shared if alike.strips else self._orthogonalize_whole
                one_way(alike, staged.elements, moves, found)
                self._work.meter.matrices += len(alike.matrices) * alike.like.units
                self._work.meter.ns_flops += sum(self._work.flops[i] for i in alike.matrices)
                first += len(alike.matrices)
            staged.elements = staged.elements.view(TORCH_DTYPE[self._work.numerics.dtype])
            if staged.alike:
                marks = cat(found.lines).mul_(-0.0)  # NaN where not finite; -0.0 adds nothing
                self._numbers = found.norms, marks
                self._exchange.mark(staged, marks)

    def taken_numbers(self) -> tuple[list[Tensor], Tensor]:
        """Norms, in several tensors, and marks of this step's ``homes``; forgotten here.

        A norm is NaN if its matrix is not finite, a mark if its direction is not.
        """
        numbers, self._numbers = self._numbers, None
        assert numbers is not None, "a round that was not orthogonalized"
        return numbers

    def start_scatter(self, staged: Staged) -> None:
        """Send the directions to the ranks that hold slices of their matrices."""
        with self._work.phase("muon/scatter"):
            self._scattering = self._exchange.start_scatter(staged)

    def finish(self, shards: Shards) -> None:
        """Wait for the directions of the shards, and update the shards."""
        scattering, self._scattering = self._scattering, None
        assert scattering is not None, "a round whose directions were not sent"
        with self._work.phase("muon/scatter"):
            directions = self._exchange.finish_scatter(scattering)
        if self.observer is not None:
            self.observer.before_update(self._table, shards, directions)
        with self._work.phase("muon/update"):
            self._update(shards, directions)

    def forget(self) -> None:
        """Wait for messages under way, and forget the step that they are of."""
        for under_way in (self._gathering, self._scattering):
            if under_way is not None and under_way.pending is not None:
                under_way.pending.wait()
        self._gathering = None
        self._scattering = None
        self._numbers = None

    def _advance_momentum(self, shards: Shards, leaving: Leaving) -> None:
        config = self._work.numerics.config
        here = [shards[index] for index, _ in self._table.parameters]
        momenta, grads = [each.momentum_buffer for each in here], [each.grad for each in here]
        dtypes = {grad.dtype for grad in grads}
        if len(dtypes) > 1 or torch.float16 in dtypes:  # kernels take one dtype, fp32 or bf16
            grads = [grad.float() for grad in grads]
        self._elementwise.advance_momentum(
            self._slices(momenta),
            self._slices(grads),
            leaving.slices,
            leaving.moves,
            self._table.leaving,
            momentum=config.momentum,
            nesterov=config.nesterov,
        )
        for each, momentum in zip(here, momenta, strict=True):
            each.states.put(each.shard, MOMENTUM_KEY, momentum)

    def _orthogonalize_whole(
        self, alike: Alike, elements: Tensor, moves: Tensor, found: Soundness
    ) -> None:
        """Orthogonalize matrices of one layout in batches; one without a gradient becomes zero.

        Newton-Schulz removes the momentum's scale. So without this, momentum alone would move such
        a matrix by a whole update in every step: an expert without tokens, a layer frozen part-way.
        """
        like, count, work = alike.like, len(alike.matrices), self._work
        most = at_once_on(elements.device, work.numerics, *like.unit, work.scratch)
        for at in range(0, count, most):
            together = min(most, count - at)
            start = alike.start + at * like.numel
            orthogonalize_staged(
                elements[start : start + together * like.numel],
                moves[at : at + together],
                work.numerics,
                rows=like.rows,
                cols=like.cols,
                column_parts=like.column_parts,
                column_blocks=like.column_blocks,
                apart=like.units > 1,
                soundness=found,
            )

    def _orthogonalize_shared(
        self, alike: Alike, elements: Tensor, moves: Tensor, found: Soundness
    ) -> None:
        """Orthogonalize the strips of a matrix that this rank has, with its other homes."""
        strips, start = [], alike.start
        for matrix in alike.own_strips:
            in_parts = elements[start : start + matrix.numel].view(
                matrix.column_parts, matrix.rows, matrix.cols // matrix.column_parts
            )
            strips.append(in_parts.transpose(0, 1))
            start += matrix.numel
        sharing, is_turned = self._exchange.sharing(alike), alike.strips[0].is_turned
        held = sharing.turned(strips) if is_turned else strips
        whole = alike.like.whole
        orthogonalize_strips(held, whole, moves, self._work.numerics, sharing, found)
        if is_turned:  # both still have the dtype of what travels; their memory has directions
            sharing.turn_back(held, strips)

    def _update(self, shards: Shards, directions: list[Tensor]) -> None:
        factors, decays = [], []
        scales = iter([self._work.scales[matrix] for matrix in self._table.matrices])
        here = [shards[index] for index, _ in self._table.parameters]
        for each, (_, sizes) in zip(here, self._table.parameters, strict=True):
            factors += [each.lr * next(scales) for _ in sizes]
            decays += [each.lr * each.weight_decay] * len(sizes)
        params = [each.main_param for each in here]
        self._elementwise.apply_updates(self._slices(params), directions, factors, decays)
        for each, param in zip(here, params, strict=True):
            each.states.put(each.shard, MAIN_KEY, param)

    def _slices(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """A tensor of each shard, cut into the round's slices."""
        slices: list[Tensor] = []
        for whole, (_, sizes) in zip(wholes, self._table.parameters, strict=True):
            slices += [whole] if len(sizes) == 1 else split_with_sizes(whole, sizes)
        return slices
