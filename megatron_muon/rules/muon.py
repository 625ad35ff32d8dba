"""Muon (arXiv 2502.16982, equations 1, 2 and 4), from gradient to weight.

1. ``MuonRound.before_gather``, on each shard, elementwise, with G the gradient: M ← μM
   + G, and U = G + μM with Nesterov's momentum, else U = M.
2. ``MuonRound.at_home``, where the matrix U, ``(m, n)``, is whole: its direction X by
   the five lines of Newton-Schulz::

    X = U / ‖U‖
    for a, b, c in steps:  # m ≤ n, else of Uᵀ
        A = X @ X.T
        B = b * A + c * (A @ A)
        X = a * X + B @ X

3. ``MuonRound.after_scatter``, on each shard: W ← (1 - lr·λ)·W - lr·scale·X, where
   scale is rms·√max(m, n) (``update_scale``).

Elementwise work is done here by torch's operations on lists (``Foreach``): one call for
many tensors with at most ``ELEMENTS_AT_ONCE`` elements, which bounds scratch memory.
``fused`` has kernels that make the same bits. Every operation rounds once, so results
do not depend on where a shard is cut. Fused multiply-adds are not used: one may round
differently in a kernel's vector body and in its tail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_muon.orthogonalize.matmul import TORCH_DTYPE
from megatron_muon.orthogonalize.newton_schulz import (
    at_once_on,
    by_rows,
    orthogonalize_staged,
)
from megatron_muon.orthogonalize.normalization import Soundness
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.orthogonalize.strips import orthogonalize_strips
from megatron_muon.planning.layout import Matrix
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rounds.cut import ELEMENTS_AT_ONCE, scratch_limit
from megatron_muon.planning.rounds.rank_plan import RankPlan
from megatron_muon.planning.rounds.table import RoundTable, Stack
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.exchange.messages import Exchange, Staged
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.exchange.sharers import Sharers
from megatron_muon.runtime.rule import (
    PhaseNames,
    RoundRule,
    Rule,
    Shard,
    cut_into_slices,
    put_back,
)
from megatron_muon.runtime.states import MAIN_KEY
from megatron_muon.runtime.tracing import Phase
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.patterns import AT_HOMES, only
from megatron_muon.settings.rules import row_of

# The momentum has the key of Adam's first moment, and there is no second one: fused
# Adam classes refuse to save or load a state under a key that they do not know.
MOMENTUM_KEY = "exp_avg"
_IN_CACHE = 1 << 16  # elements: three tensors of them in fp32 are 768 KiB


class Muon(Rule):
    """Muon's rule for the matrices of one stage.

    Args:
        numerics: the run's settings, and what its device computes with.
        plan: the stage's exchange plan.
        meter: counts the work done.
        own: this rank's part of the plan.
        device: of the main parameters.
        elementwise: returns the elementwise operations of one round.
    """

    names = PhaseNames("muon/momentum", "muon/newton_schulz", "muon/update")
    state_keys = (MOMENTUM_KEY,)

    def __init__(
        self,
        numerics: Numerics,
        plan: ExchangePlan,
        meter: Meter,
        own: RankPlan,
        device: torch.device,
        elementwise: Callable[[], Foreach],
    ) -> None:
        self.numerics = numerics
        self.plan = plan
        self.own = own
        self.device = device
        self.meter = meter
        self.elementwise = elementwise
        self.counts_steps = numerics.config.momentum_warmup is not None
        self.warmth = 1.0  # how far the momentum has risen
        # flops of Newton-Schulz, settings, scale per unit of lr: of each matrix of the
        # plan
        self.flops = plan.flops
        self.configs = [numerics.where(each.own).config for each in plan.matrices]
        self.scales = [
            update_scale(*matrix.whole, config)
            for matrix, config in zip(plan.matrices, self.configs, strict=True)
        ]
        # elements of scratch memory for one batch
        self.scratch = scratch_limit(plan.matrices)

    def start_step(self, steps: int) -> None:
        """See ``Rule``: the momentum warms up."""
        self.warmth = min(1.0, steps / (self.numerics.config.momentum_warmup or 1))

    def warmed(self, momentum: float | Sequence[float]) -> Any:
        """μ of the step under way, or of each slice."""
        if isinstance(momentum, Sequence):
            return [self.warmed(each) for each in momentum]
        start = self.numerics.config.momentum_start
        return (1.0 - self.warmth) * start + self.warmth * momentum

    def of_round(
        self, table: RoundTable, sharers: Mapping[tuple[int, ...], Sharers]
    ) -> MuonRound:
        """See ``Rule``."""
        return self.kind_of_round(self, table, sharers)

    @property
    def kind_of_round(self) -> type[MuonRound]:
        """The class of its work in a round."""
        return MuonRound


class MuonRound(RoundRule):
    """Muon's work in one round on one rank."""

    def __init__(
        self, muon: Muon, table: RoundTable, sharers: Mapping[tuple[int, ...], Sharers]
    ) -> None:
        self._muon = muon
        self._table = table
        self._sharers = sharers
        self._numerics = muon.numerics
        self._elementwise = muon.elementwise()
        # the scale and the momentum of each slice's matrix
        self._scales = [muon.scales[matrix] for matrix in table.matrices]
        momenta = [muon.configs[matrix].momentum for matrix in table.matrices]
        self._momentum: float | list[float] = muon.numerics.config.momentum
        if momenta:
            self._momentum = momenta if len(set(momenta)) > 1 else momenta[0]
        self._of_stack = {
            stack.matrices: muon.numerics.where(only(stack.layout.own, AT_HOMES))
            for stack in table.stacks
        }

    def before_gather(
        self,
        shards: Sequence[Shard],
        into: Sequence[Tensor | None],
        moves: Tensor,
        sums: Tensor | None = None,
    ) -> None:
        """M ← μM + G on each shard, and write U of each slice into ``into``.

        See ``RoundRule`` for the arguments, and ``Foreach.advance_momentum``.
        """
        momenta = [each.state(MOMENTUM_KEY) for each in shards]
        grads = [each.grad for each in shards]
        dtypes = {grad.dtype for grad in grads}
        # kernels take one dtype, fp32 or bf16
        if len(dtypes) > 1 or torch.float16 in dtypes:
            grads = [grad.float() for grad in grads]
        self._elementwise.advance_momentum(
            cut_into_slices(momenta, self._table),
            cut_into_slices(grads, self._table),
            into,
            moves,
            self._table.outgoing,
            momentum=self._muon.warmed(self._momentum),
            nesterov=self._numerics.config.nesterov,
        )
        put_back(shards, MOMENTUM_KEY, momenta)

    def at_home(self, staged: Staged) -> Soundness:
        """Replace each whole matrix U by its direction X, in place: see ``RoundRule``.

        A matrix without a gradient becomes zero. Newton-Schulz removes the momentum's
        scale, so momentum alone would move such a matrix by a whole update in every
        step: an expert without tokens, a layer frozen part-way.
        """
        soundness = Soundness()
        meter = self._muon.meter
        first = 0
        for stack in staged.stacks:
            moves = staged.moves[first : first + len(stack.matrices)]
            if stack.strips:
                self._orthogonalize_strips(stack, staged.elements, moves, soundness)
            else:
                self._orthogonalize_stack(stack, staged.elements, moves, soundness)
            meter.matrices += len(stack.matrices) * stack.layout.units
            meter.ns_flops += sum(self._muon.flops[i] for i in stack.matrices)
            first += len(stack.matrices)
        staged.elements = staged.elements.view(TORCH_DTYPE[self._numerics.dtype])
        return soundness

    def after_scatter(self, shards: Sequence[Shard], results: list[Tensor]) -> None:
        """W ← (1 - lr·λ)·W - lr·scale·X on each shard: see ``RoundRule``."""
        factors, decays = self._factors_and_decays(shards)
        params = [each.main_param for each in shards]
        slices = cut_into_slices(params, self._table)
        cautious = self._numerics.config.cautious_decay
        self._elementwise.apply_updates(
            slices, results, factors, decays, cautious=cautious
        )
        put_back(shards, MAIN_KEY, params)

    def _factors_and_decays(
        self, shards: Sequence[Shard]
    ) -> tuple[list[float], list[float]]:
        """lr·scale and lr·λ of each slice."""
        factors: list[float] = []
        decays: list[float] = []
        scales = iter(self._scales)
        for each, (_, sizes) in zip(shards, self._table.parameters, strict=True):
            factors += [each.lr * next(scales) for _ in sizes]
            decays += [each.lr * each.weight_decay] * len(sizes)
        return factors, decays

    def _orthogonalize_stack(
        self, stack: Stack, elements: Tensor, moves: Tensor, soundness: Soundness
    ) -> None:
        """Orthogonalize whole matrices of one layout, in batches.

        Args:
            stack: which matrices, and where they are in ``elements``.
            elements: ``Staged.elements``, ``(n,)``.
            moves: ``(k,)`` bool: whether each of the stack's k matrices has a gradient.
            soundness: takes the numbers of each matrix.
        """
        layout = stack.layout
        numerics = self._of_stack[stack.matrices]
        count = len(stack.matrices)
        most = at_once_on(elements.device, numerics, *layout.unit, self._muon.scratch)
        for at in range(0, count, most):
            batch = min(most, count - at)
            start = stack.start + at * layout.numel
            staged = elements[start : start + batch * layout.numel]
            self._orthogonalize_batch(stack, staged, moves[at : at + batch], soundness)
            if self._normalizes(stack):
                directions = staged.view(TORCH_DTYPE[numerics.dtype])
                for unit in units_of(directions, layout):
                    squares = _squares(unit, tuple(range(1, unit.dim())))
                    unit.mul_(_factor_to_norm(squares, min(layout.unit)))

    def _orthogonalize_batch(
        self, stack: Stack, staged: Tensor, moves: Tensor, soundness: Soundness
    ) -> None:
        """Replace matrices of one layout in staging order by their directions, in
        place.

        Args:
            stack, soundness: as of ``_orthogonalize_stack``.
            staged: ``(k·rows·cols,)``, some of the stack's matrices.
            moves: ``(k,)`` bool.
        """
        layout = stack.layout
        orthogonalize_staged(
            staged,
            moves,
            self._of_stack[stack.matrices],
            rows=layout.rows,
            cols=layout.cols,
            column_parts=layout.column_parts,
            column_blocks=layout.column_blocks,
            apart=layout.units > 1,
            soundness=soundness,
        )

    def _orthogonalize_strips(
        self, stack: Stack, elements: Tensor, moves: Tensor, soundness: Soundness
    ) -> None:
        """Orthogonalize a matrix that several homes share, together with the other
        homes.

        Arguments are as in ``_orthogonalize_stack``; ``stack`` has this rank's strips.
        """
        strips: list[Tensor] = []
        start = stack.start
        for matrix in stack.own_strips:
            in_parts = elements[start : start + matrix.numel].view(
                matrix.column_parts, matrix.rows, matrix.cols // matrix.column_parts
            )
            strips.append(in_parts.transpose(0, 1))
            start += matrix.numel
        sharers = self._sharers[stack.matrices]
        # strips of a wide matrix may travel as rows, and are iterated on as columns
        come_as_rows = stack.strips[0].comes_as_rows
        iterated = sharers.rows_to_columns(strips) if come_as_rows else strips
        self._orthogonalize_shared(stack, iterated, moves, soundness)
        # views in the dtype that travels; the same memory now holds the directions
        if come_as_rows:
            sharers.columns_to_rows(iterated, strips)

    def _orthogonalize_shared(
        self,
        stack: Stack,
        strips: Sequence[Tensor],
        moves: Tensor,
        soundness: Soundness,
    ) -> None:
        """Orthogonalize the strips that are here, as ``orthogonalize_strips`` takes
        them.
        """
        sharers = self._sharers[stack.matrices]
        numerics = self._of_stack[stack.matrices]
        orthogonalize_strips(
            strips, stack.layout.whole, moves, numerics, sharers, soundness
        )
        if self._normalizes(stack):
            directions = [one.view(TORCH_DTYPE[numerics.dtype]) for one in strips]
            mine = torch.stack([_squares(one) for one in directions])
            squares = sharers.all_numbers(mine[:, None]).sum(dim=0)
            factor = _factor_to_norm(squares, min(stack.layout.whole))
            for one in directions:
                one.mul_(factor)

    def _normalizes(self, stack: Stack) -> bool:
        """Whether directions get the norm of an orthogonal matrix (eq. 6)."""
        return self._muon.configs[stack.matrices[0]].scale_mode == "update_norm"


def units_of(staged: Tensor, layout: Matrix) -> Sequence[Tensor]:
    """The units of matrices in staging order, each unit a view ``(k, rows, ...)``.

    The dims behind the rows are the columns, in the order of the whole weight.

    Args:
        staged: ``(k·rows·cols,)``, k matrices one after another.
        layout: that of each of them.
    """
    parts = layout.column_parts, layout.column_blocks
    whole = by_rows(staged, layout.rows, layout.cols, *parts)
    return whole.unbind(2) if layout.units > 1 else [whole]


def _squares(x: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """Sums of squares over some dims, which stay, or over all, fp64.

    So the rounding of their order is far below that of an fp32 factor.
    """
    keeps = dims is not None
    norms: Tensor = torch.linalg.vector_norm(
        x, dim=dims, keepdim=keeps, dtype=torch.float64
    )
    return norms.square()


def _factor_to_norm(squares: Tensor, short: int) -> Tensor:
    """What gives directions with these sums of squares the norm √short, fp32; 1 for
    zeros.
    """
    return torch.where(squares > 0, short / squares, 1.0).sqrt().float()


def update_scale(rows: int, cols: int, config: MuonConfig) -> float:
    """The factor from direction to update, per unit of lr: rms·√max(rows, cols) (eq.
    4).

    The other modes are those of ``get_muon_scale_factor`` in NVIDIA's
    Emerging-Optimizers: rms·√(rows/cols) for ``unit_rms_norm``, rms·√max(1, rows/cols)
    for ``shape_scaling``. ``update_norm`` has that of ``spectral``, and directions
    whose norm is that of an orthogonal matrix, √min(rows, cols) (eq. 6).

    Args:
        rows, cols: outputs and inputs of the whole matrix, not of a rank's slice.
        config: ``matched_adamw_rms`` and ``scale_mode`` are read. With ``spectral``,
            the former is the root mean square of an update of a full-rank matrix, per
            unit of lr; with ``update_norm`` that of any.
    """
    squares = {
        "spectral": max(rows, cols),
        "unit_rms_norm": rows / cols,
        "shape_scaling": max(1.0, rows / cols),
        "update_norm": max(rows, cols),
    }
    return config.matched_adamw_rms * math.sqrt(squares[config.scale_mode])


class Foreach:
    """The elementwise operations on one rank's slices of one round, for every step.

    They are torch's operations on lists, on any device; ``fused.Fused`` has kernels.
    """

    def advance_momentum(
        self,
        momentum_buffers: Sequence[Tensor],
        grads: Sequence[Tensor],
        into: Sequence[Tensor | None],
        moves: Tensor,
        outgoing: Sequence[int],
        *,
        momentum: float | Sequence[float],
        nesterov: bool,
    ) -> None:
        """M ← μM + G in place, and copy the input of Newton-Schulz (arXiv 2502.16982,
        eq. 1).

        Args:
            momentum_buffers: M of each slice, ``(n,)`` fp32; updated.
            grads: G of each slice, ``(n,)``, reduced and clipped.
            into: for each slice, ``(n,)`` in the dtype that travels: takes G + μM, or M
                with ``nesterov`` off. None for a replica, whose elements another rank
                sends.
            moves: ``(len(outgoing),)``: takes 1 for a slice whose gradient is not all
                zero, else 0.
            outgoing: numbers of the slices that ``moves`` is about, in its order.
            momentum: μ, or that of each slice.
            nesterov: see ``into``.
        """
        lists = (momentum_buffers, grads, into)
        for numbers, (buffers, added, taken) in at_once(*lists):
            torch._foreach_mul_(buffers, _some_of(momentum, numbers))
            torch._foreach_add_(buffers, added)
            sent = [number for number, target in enumerate(taken) if target is not None]
            if not sent:
                continue
            inputs = [buffers[number] for number in sent]
            if nesterov:
                factors = _some_of(momentum, [numbers[number] for number in sent])
                inputs = list(torch._foreach_mul(inputs, factors))
                torch._foreach_add_(inputs, [added[number] for number in sent])
            torch._foreach_copy_([taken[number] for number in sent], inputs)
        if outgoing:
            moves.copy_(nonzeros([grads[number] for number in outgoing]) != 0)

    def apply_updates(
        self,
        params: Sequence[Tensor],
        directions: Sequence[Tensor],
        factors: Sequence[float],
        decays: Sequence[float],
        *,
        cautious: bool = False,
    ) -> None:
        """W ← (1 - lr·λ)W - update, in place (eq. 4; the decay is decoupled and
        unscaled).

        A slice whose direction begins with NaN or Inf stays as it is
        (``RoundExchange.mark``).

        Args:
            params: main parameters of each slice, ``(n,)`` fp32.
            directions: of each slice, ``(n,)`` in the dtype that travels; in fp32 they
                may be overwritten.
            factors: the factor of each direction: lr times its matrix's scale.
            decays: lr·λ of each slice.
            cautious: decay no element whose direction has the other sign (arXiv
                2510.12402, algorithm 1).
        """
        if not params:
            return
        stays = (
            torch.stack([direction[0] for direction in directions])
            .isfinite()
            .logical_not_()
        )
        may_stay = stays.tolist() if stays.is_cpu else [True] * len(params)
        keeps = {
            decay: torch.where(stays, 1.0, 1.0 - decay) for decay in {*decays} - {0.0}
        }
        for numbers, (weights, some) in at_once(params, directions):
            spared = _opposed(weights, some) if cautious else [None] * len(some)
            updates = in_fp32(some)
            torch._foreach_mul_(updates, [factors[number] for number in numbers])
            for number, weight, update, opposed in zip(
                numbers, weights, updates, spared, strict=True
            ):
                if may_stay[number]:
                    # a product with 0 would keep NaN
                    update.masked_fill_(stays[number], 0.0)
                if decays[number] != 0.0:
                    weight.mul_(_except(opposed, keeps[decays[number]][number]))
            torch._foreach_sub_(weights, updates)

    def blend(
        self,
        params: Sequence[Tensor],
        directions: Sequence[Tensor],
        keeps: Tensor,
        factors: Tensor,
    ) -> None:
        """W ← keep·W - factor·D in place, with factors that only the device knows.

        Args:
            params, directions: as of ``apply_updates``; directions are not overwritten.
            keeps, factors: ``(slices,)`` fp32, on the device. A direction whose factor
                is 0 may be not finite.
        """
        for numbers, (weights, some) in at_once(params, directions):
            for number, weight, direction in zip(numbers, weights, some, strict=True):
                factor = factors[number]
                update = direction.float() * factor
                update.masked_fill_(factor == 0.0, 0.0)
                weight.mul_(keeps[number]).sub_(update)


def nonzeros(tensors: list[Tensor]) -> Tensor:
    """A number of each tensor, which is 0 where all its elements are."""
    if tensors[0].is_cpu:  # where that norm takes twenty times as long
        return torch.stack([tensor.count_nonzero() for tensor in tensors])
    return torch.stack(torch._foreach_norm(tensors, math.inf))


def _some_of(values: float | Sequence[float], numbers: Sequence[int]) -> Any:
    """One value for all, or those with these numbers."""
    if isinstance(values, Sequence):
        return [values[number] for number in numbers]
    return values


def _opposed(weights: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
    """Where an element and its direction have opposite signs, each ``(n,)`` bool.

    Signs are multiplied, since a product of numbers may underflow.
    """
    pairs = zip(weights, directions, strict=True)
    return [weight.sign() * direction.sign() < 0 for weight, direction in pairs]


def _except(opposed: Tensor | None, keep: Tensor) -> Tensor:
    """``keep``, a scalar, but 1 where an element is opposed."""
    return keep if opposed is None else torch.where(opposed, 1.0, keep)


def in_fp32(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in fp32; the tensors themselves where they are in fp32 already."""
    if tensors[0].dtype == torch.float32:
        return tensors
    sizes = [tensor.numel() for tensor in tensors]
    scratch = tensors[0].new_empty(sum(sizes), dtype=torch.float32)
    copies = list(torch.split(scratch, sizes))
    torch._foreach_copy_(copies, tensors)
    return copies


def at_once(
    *lists: Sequence[Any],
) -> Iterator[tuple[list[int], tuple[list[Any], ...]]]:
    """Cut parallel lists into parts of at most ``ELEMENTS_AT_ONCE`` elements.

    A larger tensor is cut; None stays None. On a CPU a part fits into a core's cache.

    Yields:
        The numbers of a part's tensors in the lists, and its part of each list.
    """
    numbers: list[int] = []
    some: tuple[list[Any], ...] = tuple([] for _ in lists)
    most = room = _IN_CACHE if lists[0] and lists[0][0].is_cpu else ELEMENTS_AT_ONCE
    for number, tensors in enumerate(zip(*lists, strict=True)):
        size, start = tensors[0].numel(), 0
        while start < size:
            if room == 0 or (size - start > room and size <= most):
                yield numbers, some
                numbers, some, room = [], tuple([] for _ in lists), most
            stop = min(size, start + room)
            whole = stop - start == size
            for part, tensor in zip(some, tensors, strict=True):
                part.append(tensor if whole or tensor is None else tensor[start:stop])
            numbers.append(number)
            room -= stop - start
            start = stop
    if numbers:
        yield numbers, some


class DistributedMuon(Engine):
    """The Muon part of a distributed optimizer on one rank: the engine with the rule
    of the settings.

    Args:
        numerics: the run's settings, and what its device computes with.
        plan, exchange, main_params, phase: see ``Engine``.
        elementwise: returns the elementwise operations of one round.

    Attributes:
        block: Muon of block steps, with the same shards; None where all are full.
    """

    block: DistributedMuon | None = None

    def __init__(
        self,
        numerics: Numerics,
        plan: ExchangePlan,
        exchange: Exchange,
        main_params: Mapping[int, Tensor],
        phase: Phase,
        elementwise: Callable[[], Foreach] | None = None,
    ) -> None:
        self.numerics = numerics
        self.config = numerics.config
        rule = row_of(self.config.rule).imported()(
            numerics,
            plan,
            exchange.meter,
            exchange.own,
            exchange.device,
            elementwise or Foreach,
        )
        super().__init__(rule, plan, exchange, main_params, phase)

    @property
    def variants(self) -> list[DistributedMuon]:
        """The Muons of all kinds of steps, this one first."""
        return [self] if self.block is None else [self, self.block]
