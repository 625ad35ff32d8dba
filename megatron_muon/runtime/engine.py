"""The engine of a step: it brings matrices whole to their homes, and results back, in
rounds.

A rule (``rule``) says what is computed on shards and at homes. The engine knows slices,
homes, rounds and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_muon.runtime.exchange.messages import Exchange, Staged
from megatron_muon.runtime.exchange.sums import SliceSums
from megatron_muon.runtime.nonfinite import Nonfinite
from megatron_muon.runtime.round import Round
from megatron_muon.runtime.rule import Observer, Rule, Shard, Shards
from megatron_muon.runtime.states import MAIN_KEY, States
from megatron_muon.runtime.tracing import Phase

if TYPE_CHECKING:  # an engine takes any plan, whatever has made it
    from megatron_muon.planning.plan import ExchangePlan

ParamGroups = Sequence[Mapping[str, Any]]

HALF_STEPPED = (
    "a step of the optimizer ended in an error when it had changed momentum or "
    "parameters, and neither can be taken back: load the last checkpoint, or end the "
    "run"
)


class Engine:
    """The part of a distributed optimizer on one rank that updates matrices by a rule.

    Main parameters and state are flat shards on the rank that holds the shard in
    Megatron. A whole matrix exists only at its home, between gather and scatter.

    Args:
        rule: what is done to the matrices.
        plan: the stage's exchange plan.
        exchange: moves this rank's slices and results by its part of the plan.
        main_params: for each parameter of the plan that has a shard here, the
            optimizer's flat shard: fp32, or a slice of the model's weight where the
            ``States`` of a step keep the main parameter elsewhere.
        phase: names the parts of a step.

    Attributes:
        nonfinite: counts the steps that skipped a matrix whose home this rank is.
        rounds: the rounds of a step, in order.
        start_next: starts the next optimizer's step while the last results travel
            (its ``start``); None where there is no next one.

    Raises:
        ValueError: ``main_params`` do not have the sizes of the plan's shards.
    """

    def __init__(
        self,
        rule: Rule,
        plan: ExchangePlan,
        exchange: Exchange,
        main_params: Mapping[int, Tensor],
        phase: Phase,
    ) -> None:
        sizes = {index: shard.numel() for index, shard in main_params.items()}
        own = exchange.own.shards
        planned = {index: shard.size for index, shard in own.items()}
        if sizes != planned:
            raise ValueError(
                f"the plan has shards of sizes {planned} here, the optimizer {sizes}"
            )
        self.rule, self.plan = rule, plan
        self.exchange, self.meter = exchange, exchange.meter
        self.main_params = dict(main_params)
        self.rounds: list[Round] = []
        names: list[str] = []
        for number, one in enumerate(exchange.rounds):
            sums = SliceSums(plan, number, exchange) if rule.asks else None
            round = Round(one, rule, phase, sums)
            self.rounds.append(round)
            names += [plan.matrices[index].whole_name for index in round.homes]
        self.nonfinite = Nonfinite(names, exchange.device)
        self.start_next: Callable[[], None] | None = None
        self._phase = phase
        self._parameter_of = {id(shard): index for index, shard in main_params.items()}
        self._states: States | None = None  # of the step under way
        self._started: Shards | None = None
        self._begun: Staged | None = None  # the first round's results
        self._is_half_done = False  # state has advanced, and the step has not ended

    def owns(self, shard: Tensor) -> bool:
        """True if the rule, not AdamW, updates this main parameter."""
        return id(shard) in self._parameter_of

    def observe(self, observer: Observer | None) -> None:
        """Show each round's matrices and updates to ``observer`` from now on; None: to
        none.
        """
        for round in self.rounds:
            round.observer = observer

    @torch.no_grad()
    def over_matrices(
        self,
        groups: ParamGroups,
        states: States,
        numbers: Callable[[Any, Sequence[Shard]], Tensor],
    ) -> Iterator[tuple[Round, Tensor]]:
        """Sum numbers of the main parameters over matrices, outside a step.

        Args:
            groups, states: as of ``step``.
            numbers: of a round's rule and the shards here, the numbers of their slices.

        Yields:
            Each round, and its slices' sums (``SliceSums``).
        """
        self._states = states
        shards = dict(self._shards(groups, states))
        for number, round in enumerate(self.rounds):
            with self._visiting(number, (MAIN_KEY,)):
                own = numbers(round.rule, round.here(shards))
            yield round, round.over_matrices(own)

    @torch.no_grad()
    def start(
        self, groups: ParamGroups, states: States, *, works: bool = False
    ) -> None:
        """Start the first round of a step, ahead of ``step`` with the same arguments.

        Args:
            groups, states: as of ``step``.
            works: do the first round's work at home, too. Meanwhile the results of
                another optimizer travel, whose slowest home may send them late.

        Raises:
            RuntimeError: the step before ended in an error; see ``forget_step``.
        """
        if self._is_half_done:
            raise RuntimeError(HALF_STEPPED)
        self._is_half_done = True
        self.meter.start_step()
        self._states = states
        states.begin()
        if self.rule.counts_steps:
            self.rule.start_step(states.steps())
        self._started = dict(self._shards(groups, states))
        self._start_ahead(0, self._started)
        if works and self.rounds:
            self._begun = self._worked(0, self._started)

    @torch.no_grad()
    def step(
        self, groups: ParamGroups, states: States, step_adamw: Callable[[], None]
    ) -> None:
        """Update the rule's parameters and AdamW's. Every rank of the stage calls it.

        A matrix whose result is not finite stays as it is on all ranks, without decay.

        While the homes work on a round, the next one is gathered, and the results of
        the one before go back. A round without messages on this rank starts just before
        its work at home and finishes just after it, so that it holds memory only then.

        Args:
            groups: Megatron's parameter groups; ``lr`` and ``weight_decay`` are read.
            states: main parameters and state of the shards.
            step_adamw: updates the parameters that the rule does not own.

        Raises:
            RuntimeError: the step before ended in an error; see ``forget_step``.
        """
        if self._started is None:
            self.start(groups, states)
        assert self._started is not None
        shards, self._started = self._started, None
        if not states.adamw_is_last:  # while the first round travels
            self._adamw(step_adamw)
        for number, round in enumerate(self.rounds):
            staged, self._begun = self._begun, None
            if staged is None:
                staged = self._worked(number, shards)
            self._finish_behind(number - 1, shards)
            round.start_scatter(staged)
            if not round.travels:
                self._finish(number, shards)
        if self.start_next is not None:
            self.start_next()
        self._finish_behind(len(self.rounds) - 1, shards)
        with self._phase(self.rule.names.after_scatter):
            self.nonfinite.add(
                [round.taken_numbers() for round in self.rounds if round.homes]
            )
        if states.adamw_is_last:
            self._adamw(step_adamw)
        self._is_half_done = False

    def forget_step(self) -> None:
        """Forget a step that ended in an error: state and parameters are loaded anew.

        It waits for messages under way, which a later step would take for its own.

        Raises:
            PhaseError: another rank has not sent or taken such a message.
        """
        if not self._is_half_done:
            return
        for round in self.rounds:
            round.forget()
        assert self._states is not None
        self._states.begin()
        self._started = self._begun = None
        self._is_half_done = False

    def _adamw(self, step_adamw: Callable[[], None]) -> None:
        with self._phase("muon/adamw"):
            step_adamw()

    def _worked(self, number: int, shards: Shards) -> Staged:
        """Work on a round at home; the next one's slices are on their way by then."""
        round = self.rounds[number]
        if not round.travels:
            self._start(number, shards)
        staged = round.finish_gather()
        self._start_ahead(number + 1, shards)
        round.work(staged)
        return staged

    def _start_ahead(self, number: int, shards: Shards) -> None:
        """Start a round that has messages, while the round before is worked on."""
        if number < len(self.rounds) and self.rounds[number].travels:
            self._start(number, shards)

    def _finish_behind(self, number: int, shards: Shards) -> None:
        """Finish a round that has messages, once the next round is worked on."""
        if number >= 0 and self.rounds[number].travels:
            self._finish(number, shards)

    def _start(self, number: int, shards: Shards) -> None:
        with self._visiting(number, self.rule.state_keys):
            self.rounds[number].start(shards)

    def _finish(self, number: int, shards: Shards) -> None:
        with self._visiting(number, (MAIN_KEY,)):
            self.rounds[number].finish(shards)

    @contextmanager
    def _visiting(self, number: int, keys: Sequence[str]) -> Iterator[None]:
        """A context in which these states of a round's shards are on the device."""
        assert self._states is not None
        with ExitStack() as stack:
            for key in keys:
                stack.enter_context(self._states.visiting(number, key))
            yield

    def _shards(
        self, groups: ParamGroups, states: States
    ) -> Iterator[tuple[int, Shard]]:
        keys = self.rule.state_keys
        for group in groups:
            for shard in filter(self.owns, group["params"]):
                states.start_state(shard, keys)
                at = Shard(shard, states, group["lr"], group["weight_decay"])
                yield self._parameter_of[id(shard)], at
