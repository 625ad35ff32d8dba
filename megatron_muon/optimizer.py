"""One step of Distributed Muon over a rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_muon.config import MuonConfig
from megatron_muon.exchange import Exchange, Gathered, Gathering, Meter, Moving
from megatron_muon.iteration import ns_flops
from megatron_muon.layout import Span
from megatron_muon.newton_schulz import at_once_on, orthogonalize_at_once
from megatron_muon.phases import Phase
from megatron_muon.plan import ExchangePlan
from megatron_muon.products import plan_device, travel_dtype
from megatron_muon.update import advance_momentum, apply_update, update_scale

# The momentum lives under Adam's name of a first moment, with no second one: fused Adam classes
# refuse to save or load a state by a name that they do not know.
MOMENTUM_KEY = "exp_avg"

ParamGroups = Sequence[Mapping[str, Any]]
State = Mapping[Tensor, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class _Shard:
    """A local piece of a Muon parameter in this step, and its group's settings."""

    parameter: int
    main_param: Tensor
    grad: Tensor
    momentum_buffer: Tensor
    lr: float
    weight_decay: float


class DistributedMuon:
    """The Muon part of a distributed optimizer on one rank.

    What is whose: fp32 main parameters and momentum buffers are flat shards, held by whoever holds
    the shard in Megatron; a whole matrix exists only at its home, between gather and scatter.

    Args:
        config: the settings.
        plan: the stage's exchange plan.
        rank: this rank, as in ``plan.grid``.
        exchange: runs the plan for it.
        main_params: for each parameter of the plan that has a piece here, its flat fp32 shard.
        meter: counts what is done.
        phase: names the parts of a step.
    """

    def __init__(
        self,
        config: MuonConfig,
        plan: ExchangePlan,
        rank: int,
        exchange: Exchange,
        main_params: Mapping[int, Tensor],
        meter: Meter,
        phase: Phase,
    ) -> None:
        sizes = {index: shard.numel() for index, shard in main_params.items()}
        planned = {index: piece.size for index, piece in plan.pieces(rank).items()}
        if sizes != planned:
            raise ValueError(f"the plan has pieces of sizes {planned} here, the optimizer {sizes}")
        self.config = config
        self.plan = plan
        self.meter = meter
        self.main_params = dict(main_params)
        self._exchange = exchange
        self._phase = phase
        self._parameter_of = {id(shard): index for index, shard in main_params.items()}
        self._scales = _scales(plan, rank, config)

    def owns(self, shard: Tensor) -> bool:
        """True if Muon, not AdamW, updates this main parameter."""
        return id(shard) in self._parameter_of

    @torch.no_grad()
    def step(self, groups: ParamGroups, state: State, step_adamw: Callable[[], None]) -> None:
        """Update Muon's parameters and AdamW's. Every rank of the stage calls it.

        Round k + 1 is gathered, and the directions of round k - 1 go back, while round k is
        orthogonalized.

        Args:
            groups: Megatron's parameter groups; ``lr`` and ``weight_decay`` are read.
            state: holds each Muon shard's momentum under ``MOMENTUM_KEY``.
            step_adamw: updates all that Muon does not own.
        """
        self.meter.start_step()
        rounds = self._in_rounds(self._shards(groups, state))
        gathering = self._start_gather(rounds, 0)
        with self._phase("muon/adamw"):  # while the first round travels
            step_adamw()
        scattering = None
        for number in range(len(rounds)):
            matrices = self._finish_gather(number, gathering)
            gathering = self._start_gather(rounds, number + 1)
            with self._phase("muon/newton_schulz"):
                directions = self._orthogonalize(matrices)
            self._finish_round(rounds, number - 1, scattering)
            with self._phase("muon/scatter"):
                scattering = self._exchange.start_scatter(number, directions)
        self._finish_round(rounds, len(rounds) - 1, scattering)

    def _start_gather(self, rounds: Sequence[Sequence[_Shard]], number: int) -> Gathering | None:
        if number == len(rounds):
            return None
        with self._phase("muon/momentum"):
            pieces = self._advance_momentum(rounds[number])
        grads = {shard.parameter: shard.grad for shard in rounds[number]}
        with self._phase("muon/gather"):
            return self._exchange.start_gather(number, pieces, grads)

    def _finish_gather(self, number: int, gathering: Gathering | None) -> dict[int, Gathered]:
        assert gathering is not None
        with self._phase("muon/gather"):
            return self._exchange.finish_gather(number, gathering)

    def _finish_round(
        self, rounds: Sequence[Sequence[_Shard]], number: int, scattering: Moving | None
    ) -> None:
        if scattering is None:
            return
        with self._phase("muon/scatter"):
            updates = self._exchange.finish_scatter(scattering)
        with self._phase("muon/update"):
            self._update(rounds[number], updates)

    def _in_rounds(self, shards: Iterable[_Shard]) -> list[list[_Shard]]:
        shard_of = {shard.parameter: shard for shard in shards}
        return [[shard_of[i] for i in round if i in shard_of] for round in self.plan.rounds]

    def _shards(self, groups: ParamGroups, state: State) -> Iterator[_Shard]:
        for group in groups:
            for shard in group["params"]:
                if self.owns(shard):
                    yield _Shard(
                        parameter=self._parameter_of[id(shard)],
                        main_param=shard,
                        grad=shard.grad,
                        momentum_buffer=state[shard][MOMENTUM_KEY],
                        lr=group["lr"],
                        weight_decay=group["weight_decay"],
                    )

    def _advance_momentum(self, shards: Sequence[_Shard]) -> dict[int, Tensor]:
        config = self.config
        pieces = {}
        for shard in shards:
            moved = advance_momentum(
                shard.momentum_buffer,
                shard.grad,
                momentum=config.momentum,
                nesterov=config.nesterov,
            )
            pieces[shard.parameter] = moved.to(travel_dtype(config))
        return pieces

    def _orthogonalize(self, matrices: dict[int, Gathered]) -> dict[int, Tensor]:
        """The directions; zero where a matrix has no gradient in this step.

        Momentum alone would move such a matrix by a whole update for ever, since Newton-Schulz
        takes its scale away: an expert without tokens, a layer that is frozen part-way.
        """
        directions: dict[int, Tensor] = {}
        for indices in self._batches({i: matrix.elements for i, matrix in matrices.items()}):
            gathered = [matrices.pop(index) for index in indices]
            batch, moves = [each.elements for each in gathered], [each.moves for each in gathered]
            del gathered
            made = orthogonalize_at_once(batch, self.config, moves)
            directions.update(zip(indices, made, strict=True))
            (rows, cols), device = batch[0].shape, plan_device(batch[0].device)
            self.meter.matrices += len(batch)
            self.meter.ns_flops += len(batch) * ns_flops(rows, cols, self.config, device)
        return directions

    def _batches(self, matrices: Mapping[int, Tensor]) -> list[list[int]]:
        """Indices of matrices of one shape, as many together as the device takes at once."""
        of_shape: dict[tuple[int, ...], list[int]] = {}
        for index in sorted(matrices):
            of_shape.setdefault(tuple(matrices[index].shape), []).append(index)
        batches = []
        for indices in of_shape.values():
            most = at_once_on(matrices[indices[0]].device, self.config)
            batches += [indices[at : at + most] for at in range(0, len(indices), most)]
        return sorted(batches)

    def _update(self, shards: Sequence[_Shard], directions: dict[int, Tensor]) -> None:
        for shard in shards:
            update = directions.pop(shard.parameter).float()
            for span, scale in self._scales[shard.parameter]:
                update[span.start : span.stop].mul_(shard.lr * scale)
            apply_update(shard.main_param, update, lr=shard.lr, weight_decay=shard.weight_decay)


def _scales(
    plan: ExchangePlan, rank: int, config: MuonConfig
) -> dict[int, list[tuple[Span, float]]]:
    """For each local piece, the spans of it that have one scale: that of their matrix."""
    pieces = plan.pieces(rank)
    scales: dict[int, list[tuple[Span, float]]] = {index: [] for index in pieces}
    held = (segment for segment in plan.segments if segment.rank == rank)
    for segment in sorted(held, key=lambda segment: segment.elements):
        matrix = plan.matrices[segment.matrix]
        scale = update_scale(matrix.rows, matrix.cols, config)
        span = segment.elements.shift(-pieces[segment.parameter].start)
        spans = scales[segment.parameter]
        if spans and spans[-1][1] == scale:  # segments cover a piece without a gap
            span = Span(spans.pop()[0].start, span.stop)
        spans.append((span, scale))
    return scales
