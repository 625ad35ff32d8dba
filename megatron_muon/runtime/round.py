"""One round of a step: its matrices come to their homes, and results go back to the
shards.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, cat

from megatron_muon.runtime.exchange.messages import RoundExchange, Staged
from megatron_muon.runtime.exchange.sums import SliceSums
from megatron_muon.runtime.rule import Observer, Rule, Shard, Shards
from megatron_muon.runtime.tracing import Phase


class Round:
    """A round on one rank: ``start`` it, ``work``, ``start_scatter``, ``finish`` it.

    Between two of these calls, other rounds may be worked on while this one's messages
    travel. Each call frees the memory that no later call needs.

    Args:
        exchange: moves its slices and results.
        rule: does the work on shards and at homes.
        phase: names the parts of a step.
        sums: adds the numbers of slices; None where the rule asks for none.

    Attributes:
        rule: the rule's work in this round.
        homes: the matrices whose home this rank is.
        parameters: the plan's indices of those with a shard here.
        matrices: the plan's index of the matrix of each slice here.
        travels: this rank sends or receives messages in this round.
        observer: sees this step's matrices and updates; None except in a logging step.
    """

    def __init__(
        self, exchange: RoundExchange, rule: Rule, phase: Phase, sums: SliceSums | None
    ) -> None:
        self._exchange, self._sums = exchange, sums
        self._table, self._names = exchange.table, rule.names
        self._asks_before, self._asks_after = rule.asks_before, rule.asks_after
        self.rule = rule.of_round(exchange.table, exchange.sharers)
        self._phase = phase
        self.homes = self._table.homes
        self.travels = self._table.travels or rule.asks
        self.matrices = self._table.matrices
        self.parameters = [index for index, _ in self._table.parameters]
        self.observer: Observer | None = None
        self._numbers: tuple[Sequence[Tensor], Tensor] | None = None

    def start(self, shards: Shards) -> None:
        """Advance the state of the shards, and send their slices to the homes."""
        here = self.here(shards)
        with self._phase(self._names.before_gather):
            sums = None
            if self._asks_before:  # before messages take memory
                sums = self.over_matrices(self.rule.numbers_before(here))
            outgoing = self._exchange.outgoing()
            self.rule.before_gather(here, outgoing.slices, outgoing.moves, sums)
        with self._phase("muon/gather"):
            self._exchange.start_gather(outgoing)

    def finish_gather(self) -> Staged:
        """Wait for the matrices whose home this rank is."""
        with self._phase("muon/gather"):
            return self._exchange.finish_gather()

    def work(self, staged: Staged) -> None:
        """Replace matrices by their results, in place; mark those that are not
        finite.
        """
        if self.observer is not None:
            self.observer.before_home(staged)
        with self._phase(self._names.at_home):
            found = self.rule.at_home(staged)
            if staged.stacks:
                # NaN where not finite, else -0.0, which changes no element
                marks = cat(list(found.lines)).mul_(-0.0)
                self._numbers = found.norms, marks
                self._exchange.mark(staged, marks)

    def taken_numbers(self) -> tuple[Sequence[Tensor], Tensor]:
        """Return and forget this step's norms, in several tensors, and marks of
        ``homes``.

        A norm is NaN if what came to the home is not finite, a mark if the result is
        not.
        """
        numbers, self._numbers = self._numbers, None
        assert numbers is not None, "a round that was not worked on"
        return numbers

    def start_scatter(self, staged: Staged) -> None:
        """Send the results to the ranks that hold slices of their matrices."""
        with self._phase("muon/scatter"):
            self._exchange.start_scatter(staged)

    def finish(self, shards: Shards) -> None:
        """Wait for the results of the shards, and update the shards."""
        with self._phase("muon/scatter"):
            results = self._exchange.finish_scatter()
        if self.observer is not None:
            self.observer.before_update(self._table, shards, results)
        here = self.here(shards)
        with self._phase(self._names.after_scatter):
            self.rule.after_scatter(here, results)
            if self._asks_after:
                numbers = self.rule.numbers_after(here)
                self.rule.finish(here, self.over_matrices(numbers))

    def forget(self) -> None:
        """Wait for messages under way, and forget the step that they belong to."""
        self._exchange.forget()
        self._numbers = None

    def here(self, shards: Shards) -> list[Shard]:
        """The shards of the round on this rank, in the order of ``parameters``."""
        return [shards[index] for index in self.parameters]

    def over_matrices(self, numbers: Tensor) -> Tensor:
        """See ``SliceSums``; for a rule that asks for sums."""
        assert self._sums is not None
        return self._sums.over_matrices(numbers)
