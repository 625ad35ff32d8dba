"""What the engine asks of a rule: the work on shards and at homes, between its
messages.

A step of the engine does this for each round, in this order:

1. Each rank: ``before_gather`` writes what each slice sends (elementwise, from its
gradient).
2. The engine brings every matrix whole to its home.
3. The home: ``at_home`` replaces matrices by their results.
4. The engine brings the results back to the slices.
5. Each rank: ``after_scatter`` updates its shards (elementwise, with the results).

A rule may ask for numbers of whole matrices at two points. It then gives numbers of
each slice, and gets their sums over all slices of that matrix: before step 1
(``asks_before``), and after step 5, before parameters are gathered (``asks_after``). A
rule that asks for none pays nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_muon.planning.rounds.table import RoundTable
from megatron_muon.runtime.exchange.messages import Staged
from megatron_muon.runtime.exchange.sharers import Sharers
from megatron_muon.runtime.states import MAIN_KEY, States

if TYPE_CHECKING:  # for rules that keep some
    from megatron_muon.runtime.home_state import HomeState


class Shard(NamedTuple):
    """A parameter's shard on this rank in this step, and its group's settings."""

    shard: Tensor
    states: States
    lr: float
    weight_decay: float

    @property
    def main_param(self) -> Tensor:
        """Flat, fp32; a copy where ``states`` says so."""
        return self.state(MAIN_KEY)

    @property
    def grad(self) -> Tensor:
        """Like the main parameter; reduced and clipped. It is checked before the
        step.
        """
        grad = self.states.grad(self.shard)
        assert grad is not None
        return grad

    def state(self, key: str) -> Tensor:
        """The shard's state of that name, like the main parameter."""
        return self.states.get(self.shard, key)

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep new values of what ``state`` returned, which may be a copy."""
        self.states.put(self.shard, key, tensor)


def put_back(shards: Sequence[Shard], key: str, tensors: Sequence[Tensor]) -> None:
    """Keep what ``Shard.state`` returned and was changed in place, where those are
    copies.
    """
    for each, tensor in zip(shards, tensors, strict=True):
        if each.states.are_copies:
            each.put(key, tensor)


Shards = Mapping[int, Shard]  # by the parameter's index in the plan


class Findings(Protocol):
    """Two numbers of each matrix at home: whether it and its result are finite.

    Each list of tensors has, one after another, a number of each matrix, in the order
    of ``Staged.stacks``.
    """

    @property
    def norms(self) -> Sequence[Tensor]:
        """Each ``(k,)``: NaN where what came to the home is not finite."""

    @property
    def lines(self) -> Sequence[Tensor]:
        """Each ``(k,)``: NaN or infinite where the result is not finite, as one line of
        it shows.
        """


@dataclass(frozen=True, slots=True)
class PhaseNames:
    """What traces, timers and errors call a rule's three parts."""

    before_gather: str
    at_home: str
    after_scatter: str


class RoundRule(ABC):
    """The rule's work in one round on one rank, in every step.

    ``shards`` are those of the round on this rank, in the order of
    ``RoundTable.parameters``. A list "of each slice" is in the order of the table's
    slices.
    """

    @abstractmethod
    def before_gather(
        self,
        shards: Sequence[Shard],
        into: Sequence[Tensor | None],
        moves: Tensor,
        sums: Tensor | None,
    ) -> None:
        """Advance the shards' state, and write what each slice sends to its home.

        Args:
            into: of each slice, ``(n,)`` in the dtype that travels; None for a replica,
                whose elements another rank sends.
            moves: of each slice of ``RoundTable.outgoing``: takes 1 if its gradient has
                an entry that is not zero, else 0; or another number, of which the home
                gets the sum (``Staged.flags``).
            sums: the answer to ``numbers_before``; None where the rule does not ask.
        """

    @abstractmethod
    def at_home(self, staged: Staged) -> Findings:
        """Replace the matrices whose home this rank is by their results, in place.

        The homes of a shared matrix call it at the same time, since each rank goes
        through the rounds in the same order.
        """

    @abstractmethod
    def after_scatter(self, shards: Sequence[Shard], results: list[Tensor]) -> None:
        """Update the shards.

        A slice whose result begins with NaN or Inf stays as it is
        (``RoundExchange.mark``).

        Args:
            results: of each slice, ``(n,)`` in the dtype of ``at_home``'s results.
        """

    def numbers_before(self, shards: Sequence[Shard]) -> Tensor:
        """A number of each slice, ``(slices,)``, or several, ``(slices, k)``, say of
        its gradient (``asks_before``).
        """
        raise NotImplementedError(
            f"{type(self).__name__} asks for sums and gives no numbers"
        )

    def numbers_after(self, shards: Sequence[Shard]) -> Tensor:
        """A number of each slice, ``(slices,)``, or several, ``(slices, k)``, say of
        its new weight (``asks_after``).
        """
        raise NotImplementedError(
            f"{type(self).__name__} asks for sums and gives no numbers"
        )

    def finish(self, shards: Sequence[Shard], sums: Tensor) -> None:
        """Update the shards by ``numbers_after``'s answer, of its shape in fp32."""
        raise NotImplementedError(f"{type(self).__name__} asks for sums and uses none")


class Rule(ABC):
    """What one optimizer does to its matrices on one rank."""

    names = PhaseNames("muon/before", "muon/home", "muon/after")  # of its parts
    # states of a shard that before_gather reads and writes
    state_keys: tuple[str, ...] = ()
    home_state: HomeState | None = None  # what it keeps at homes
    counts_steps = False  # whether it wants ``start_step``
    asks_before = False  # whether it asks for sums of numbers_before
    asks_after = False  # whether it asks for sums of numbers_after

    @property
    def asks(self) -> bool:
        """Whether it asks for any sums."""
        return self.asks_before or self.asks_after

    def start_step(self, steps: int) -> None:
        """A step begins; Adam has counted ``steps`` before it, also before a resume."""
        raise NotImplementedError(f"{type(self).__name__} counts steps for nothing")

    @abstractmethod
    def of_round(
        self, table: RoundTable, sharers: Mapping[tuple[int, ...], Sharers]
    ) -> RoundRule:
        """Its work in one round.

        Args:
            table: this rank's part of the round.
            sharers: by ``Stack.matrices``, the homes of each matrix that this rank
                shares.
        """


class Observer(Protocol):
    """Is shown what a logging step's rounds compute, and changes none of it."""

    def before_home(self, staged: Staged) -> None:
        """Matrices at their home, before the rule's work there."""

    def before_update(
        self, table: RoundTable, shards: Shards, results: Sequence[Tensor]
    ) -> None:
        """The results of the slices that are held here, before the shards are
        updated.
        """


def cut_into_slices(wholes: Sequence[Tensor], table: RoundTable) -> list[Tensor]:
    """A tensor of each shard, cut into the round's slices."""
    slices: list[Tensor] = []
    for whole, (_, sizes) in zip(wholes, table.parameters, strict=True):
        slices += (
            [whole] if len(sizes) == 1 else torch.split_with_sizes(whole, list(sizes))
        )
    return slices
