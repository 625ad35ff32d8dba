"""One step of Distributed Muon over a rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, split_with_sizes

from megatron_muon.config import MuonConfig
from megatron_muon.orthogonalize.iteration import ns_flops
from megatron_muon.orthogonalize.matmul import plan_device
from megatron_muon.orthogonalize.newton_schulz import at_once_on, orthogonalize_staged
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rank_plan import RankPlan
from megatron_muon.planning.rounds import scratch_limit
from megatron_muon.runtime.exchange import Exchange, Gathering, Leaving, Meter, Scattering, Staged
from megatron_muon.runtime.tracing import Phase
from megatron_muon.runtime.update import Elementwise, Foreach, update_scale

# The momentum lives under Adam's name of a first moment, with no second one: fused Adam classes
# refuse to save or load a state by a name that they do not know.
MOMENTUM_KEY = "exp_avg"

ParamGroups = Sequence[Mapping[str, Any]]
State = Mapping[Tensor, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class _Shard:
    """A local piece of a Muon parameter in this step, and its group's settings."""

    main_param: Tensor
    grad: Tensor
    momentum_buffer: Tensor
    lr: float
    weight_decay: float


Shards = Mapping[int, _Shard]  # by the parameter's index in the plan
_Begun = tuple[Shards, Gathering | None]


class DistributedMuon:
    """The Muon part of a distributed optimizer on one rank.

    What is whose: fp32 main parameters and momentum buffers are flat shards, held by whoever holds
    the shard in Megatron; a whole matrix exists only at its home, between gather and scatter.

    Args:
        config: the settings.
        plan: the stage's exchange plan.
        own: this rank's part of it.
        exchange: runs the plan for it.
        main_params: for each parameter of the plan that has a piece here, its flat fp32 shard.
        meter: counts what is done.
        phase: names the parts of a step.
        elementwise: makes a round's elementwise operations.

    Attributes:
        elementwise: see above.
        start_next: begins the step of the optimizer that comes after this one, while the last
            directions travel; None where there is none.
    """

    def __init__(
        self,
        config: MuonConfig,
        plan: ExchangePlan,
        own: RankPlan,
        exchange: Exchange,
        main_params: Mapping[int, Tensor],
        meter: Meter,
        phase: Phase,
        elementwise: Callable[[], Elementwise] = Foreach,
    ) -> None:
        sizes = {index: shard.numel() for index, shard in main_params.items()}
        planned = {index: piece.size for index, piece in own.pieces.items()}
        if sizes != planned:
            raise ValueError(f"the plan has pieces of sizes {planned} here, the optimizer {sizes}")
        self.config = config
        self.plan, self.own = plan, own
        self.meter = meter
        self.main_params = dict(main_params)
        self._exchange = exchange
        self._phase = phase
        self._parameter_of = {id(shard): index for index, shard in main_params.items()}
        self._tables = exchange.tables
        self.elementwise = elementwise
        self._elementwise = [elementwise() for _ in self._tables]
        self._scales = [update_scale(m.rows, m.cols, config) for m in plan.matrices]
        self._scratch = scratch_limit(plan.matrices)
        self._begun: _Begun | None = None
        self.start_next: Callable[[], None] | None = None

    def owns(self, shard: Tensor) -> bool:
        """True if Muon, not AdamW, updates this main parameter."""
        return id(shard) in self._parameter_of

    @torch.no_grad()
    def step(self, groups: ParamGroups, state: State, step_adamw: Callable[[], None]) -> None:
        """Update Muon's parameters and AdamW's. Every rank of the stage calls it.

        Round k + 1 is gathered, and the directions of round k - 1 go back, while round k is
        orthogonalized. A round that is all at home is begun and ended in its turn, since nothing
        of it has to travel and its memory is not needed before.

        Args:
            groups: Megatron's parameter groups; ``lr`` and ``weight_decay`` are read.
            state: holds each Muon shard's momentum under ``MOMENTUM_KEY``.
            step_adamw: updates all that Muon does not own.
        """
        if self._begun is None:
            self.start(groups, state)
        assert self._begun is not None
        (shards, gathering), self._begun = self._begun, None
        with self._phase("muon/adamw"):  # while the first round travels
            step_adamw()
        scattering: Scattering | None = None
        for number in range(len(self._tables)):
            staged = self._finish_gather(number, gathering or self._start_gather(shards, number))
            gathering = self._start_early(shards, number + 1)
            with self._phase("muon/newton_schulz"):
                self._orthogonalize(staged)
            self._finish_round(shards, number - 1, scattering)
            scattering = self._start_scatter(number, staged)
            if not self._tables[number].travels:
                self._finish_round(shards, number, scattering)
                scattering = None
        if self.start_next is not None:
            self.start_next()
        self._finish_round(shards, len(self._tables) - 1, scattering)

    def connect(self) -> int:
        """See ``Exchange.connect``."""
        return self._exchange.connect()

    @torch.no_grad()
    def start(self, groups: ParamGroups, state: State) -> None:
        """Begin a step: its first round travels until ``step``, which is called with the same."""
        self.meter.start_step()
        shards = dict(self._shards(groups, state))
        self._begun = shards, self._start_early(shards, 0)

    def _start_early(self, shards: Shards, number: int) -> Gathering | None:
        """The gather of a round that travels, while others are at work."""
        if number == len(self._tables) or not self._tables[number].travels:
            return None
        return self._start_gather(shards, number)

    def _start_gather(self, shards: Shards, number: int) -> Gathering:
        with self._phase("muon/momentum"):
            leaving = self._exchange.leaving(number)
            self._advance_momentum(shards, number, leaving)
        with self._phase("muon/gather"):
            return self._exchange.start_gather(number, leaving)

    def _finish_gather(self, number: int, gathering: Gathering) -> Staged:
        with self._phase("muon/gather"):
            return self._exchange.finish_gather(number, gathering)

    def _start_scatter(self, number: int, staged: Staged) -> Scattering:
        with self._phase("muon/scatter"):
            return self._exchange.start_scatter(number, staged)

    def _finish_round(self, shards: Shards, number: int, scattering: Scattering | None) -> None:
        if scattering is None:
            return
        with self._phase("muon/scatter"):
            directions = self._exchange.finish_scatter(number, scattering)
        with self._phase("muon/update"):
            self._update(shards, number, directions)

    def _shards(self, groups: ParamGroups, state: State) -> Iterator[tuple[int, _Shard]]:
        for group in groups:
            for shard in group["params"]:
                if self.owns(shard):
                    yield (
                        self._parameter_of[id(shard)],
                        _Shard(
                            main_param=shard,
                            grad=shard.grad,
                            momentum_buffer=state[shard][MOMENTUM_KEY],
                            lr=group["lr"],
                            weight_decay=group["weight_decay"],
                        ),
                    )

    def _runs(self, shards: Shards, number: int, name: _Held) -> list[Tensor]:
        """One of a shard's tensors, cut into the round's runs."""
        runs: list[Tensor] = []
        for index, sizes in self._tables[number].parameters:
            whole: Tensor = getattr(shards[index], name)
            runs += [whole] if len(sizes) == 1 else split_with_sizes(whole, sizes)
        return runs

    def _advance_momentum(self, shards: Shards, number: int, leaving: Leaving) -> None:
        self._elementwise[number].advance_momentum(
            self._runs(shards, number, "momentum_buffer"),
            self._runs(shards, number, "grad"),
            leaving.runs,
            leaving.moves,
            self._tables[number].moving,
            momentum=self.config.momentum,
            nesterov=self.config.nesterov,
        )

    def _orthogonalize(self, staged: Staged) -> None:
        """Matrices become directions; zero where a matrix has no gradient in this step.

        Momentum alone would move such a matrix by a whole update for ever, since Newton-Schulz
        takes its scale away: an expert without tokens, a layer that is frozen part-way.
        """
        device, first = staged.elements.device, 0
        for alike in staged.alike:
            like, count = alike.like, len(alike.matrices)
            most = at_once_on(device, self.config, like.rows, like.cols, self._scratch)
            for at in range(0, count, most):
                together = min(most, count - at)
                start = alike.start + at * like.numel
                orthogonalize_staged(
                    staged.elements[start : start + together * like.numel],
                    staged.moves[first + at : first + at + together],
                    self.config,
                    rows=like.rows,
                    cols=like.cols,
                    column_parts=like.column_parts,
                    column_blocks=like.column_blocks,
                )
            first += count
            self.meter.matrices += count
            kind = plan_device(device)
            self.meter.ns_flops += count * ns_flops(like.rows, like.cols, self.config, kind)

    def _update(self, shards: Shards, number: int, directions: list[Tensor]) -> None:
        table, factors, decays = self._tables[number], [], []
        scales = iter([self._scales[matrix] for matrix in table.matrices])
        for index, sizes in table.parameters:
            shard = shards[index]
            factors += [shard.lr * next(scales) for _ in sizes]
            decays += [shard.lr * shard.weight_decay] * len(sizes)
        params = self._runs(shards, number, "main_param")
        self._elementwise[number].apply_updates(params, directions, factors, decays)


_Held = Literal["main_param", "grad", "momentum_buffer"]
