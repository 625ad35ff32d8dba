"""The exchange that a plan describes: slices go to their homes, results come back.

Each round has one gather and one scatter over the stage: each is a message from every
rank to every other one that it shares a matrix with. Other work runs between its start
and its finish. A rank's Python and launches depend on its own messages, not on the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, split_with_sizes

from megatron_muon.planning.layout import Matrix
from megatron_muon.planning.rounds.rank_plan import RankPlan
from megatron_muon.planning.rounds.table import RoundTable, Stack, round_tables
from megatron_muon.planning.slices import ALIGNED
from megatron_muon.runtime import collectives
from megatron_muon.runtime.collectives import (
    Counts,
    Group,
    Pending,
    Route,
    consecutive,
    world_ranks,
)
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.exchange.sharers import Sharers


@dataclass(slots=True)
class Outgoing:
    """This rank's buffers of a round before it is gathered."""

    # for each slice that is held here, the range of kept or sent that takes what it
    # sends; None for a replica
    slices: list[Tensor | None]
    moves: Tensor  # takes 1 for each outgoing slice that has a gradient, else 0
    # buffer of the slices that are home already, in staged order; the staged buffer
    # itself where the round is in_place
    kept: Tensor
    sent: Tensor  # the message with the other slices


@dataclass(slots=True)
class Staged:
    """The matrices of a round whose home this rank is."""

    # flat, each matrix in staging order, in the order of stacks. In the dtype that
    # travels; in that of results once the rule has made them.
    elements: Tensor
    # bool, for each matrix: whether it has a gradient that is not zero in this step
    moves: Tensor
    stacks: tuple[Stack, ...]  # the matrices, grouped by layout
    # for each matrix the sum of what ``before_gather`` has written for its slices
    flags: Tensor

    def taken(self) -> Tensor:
        """Return the elements and drop the reference to them."""
        elements, self.elements = self.elements, self.elements.new_empty(0)
        return elements


class Exchange:
    """Runs a plan for one rank of the stage.

    Args:
        own: this rank's part of the exchange plan.
        matrices: all matrices of the stage.
        group: process group of the stage.
        dtype: dtype of the elements that travel.
        device: the device that matrices are assembled on.
        meter: counts the bytes sent.

    Attributes:
        own, group, device, meter: as given.
        like: an empty tensor of the dtype that travels, on the device.
        rounds: this rank's part of each round, in order.
    """

    def __init__(
        self,
        own: RankPlan,
        matrices: Sequence[Matrix],
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
        meter: Meter,
    ) -> None:
        self.own, self.group, self.device, self.meter = own, group, device, meter
        self.like = torch.empty(0, dtype=dtype, device=device)
        self._between = partial(Route.of, group, world_ranks(group), own.rank)
        self.rounds = [
            RoundExchange(table, self) for table in round_tables(own, matrices)
        ]

    def connect(self) -> int:
        """Send one element to every peer and take one from each; every rank of the
        stage calls it.

        NCCL makes a connection, and takes memory for it, at the first message between
        two ranks: here, and not in the middle of a step, where memory use is highest.

        Returns:
            The number of peers.
        """
        tables = [round.table for round in self.rounds]
        met = set().union(*(table.peers | table.sharers for table in tables))
        peers = sorted(met - {self.own.rank})
        ones = [(peer, 1) for peer in peers]
        sent = self.like.new_empty(ALIGNED * len(peers))
        route = self.route(ones, ones)
        pending = collectives.start_messages("muon/connect", sent, route)
        if pending is not None:
            pending.wait()
        return len(peers)

    def route(self, to: Counts, received_from: Counts) -> Route:
        """Messages of this rank, by their sizes in the order of the buffers."""
        sent = consecutive(to, ALIGNED)
        return self._between(sent, consecutive(received_from, ALIGNED))

    def sharers(self, strips: Sequence[Matrix]) -> Sharers:
        """The homes of a matrix, of whose strips this rank has some."""
        return Sharers(strips, self.own.rank, self._between, self.meter)


class RoundExchange:
    """One round for one rank; everything that is the same in every step is made once.

    In a step ``outgoing``, ``start_gather``, ``finish_gather``, ``start_scatter`` and
    ``finish_scatter`` follow each other. What is under way is kept between a start and
    its finish, and no longer.

    Args:
        table: this rank's part of the round.
        exchange: the one that this is a round of.

    Attributes:
        sharers: by ``Stack.matrices``, the homes of each matrix that this rank shares.
    """

    def __init__(self, table: RoundTable, exchange: Exchange) -> None:
        def index(places: Sequence[int]) -> Tensor:
            return torch.tensor(places, dtype=torch.int64, device=exchange.device)

        self.table = table
        self._gather = exchange.route(table.sent.counts, table.received.counts)
        self._scatter = exchange.route(table.results.counts, table.returned.counts)
        self.sharers = {
            stack.matrices: exchange.sharers(stack.strips)
            for stack in table.stacks
            if stack.strips
        }
        self._sent_flags = index(table.sent.flags)
        self._received_flags = index(table.received.flags)
        self._places = index(table.places)
        self._firsts = index([0, *accumulate(table.staged_sizes)][:-1])
        self._of_firsts = index(table.staged_places)
        own = len(table.kept_sizes) if table.in_place else 0  # these are in their place
        self._copied = [
            at for at, source in enumerate(table.staged_from) if source >= own
        ]
        self._like, self._meter = exchange.like, exchange.meter
        self._pending: Pending | None = None  # messages under way
        # slices that are home already, and their flags
        self._kept: tuple[Tensor, Tensor] | None = None
        self._results: list[Tensor] = []  # of the slices that are home already

    def outgoing(self) -> Outgoing:
        """New buffers, into which the round's slices must be written before
        ``start_gather``.
        """
        table = self.table
        sizes = table.staged_sizes if table.in_place else table.kept_sizes
        kept = self._like.new_empty(sum(sizes))
        sent = self._like.new_empty(sum(table.sent.sizes))
        in_message = split_with_sizes(sent, table.sent.sizes)
        targets = [
            *self._kept_slices(kept),
            *(in_message[i] for i in table.sent.places),
        ]
        slices: list[Tensor | None] = [None] * len(table.slices)
        for number, target in zip(table.outgoing, targets, strict=True):
            slices[number] = target
        return Outgoing(slices, self._like.new_empty(len(table.outgoing)), kept, sent)

    def start_gather(self, outgoing: Outgoing) -> None:
        """Start to bring every matrix of the round to its home.

        After its elements a message has a flag for each of its slices: 0 where the
        gradient is all zero, else 1.

        Args:
            outgoing: buffers that ``outgoing`` made, since then filled.
        """
        table, moves = self.table, outgoing.moves
        if table.sent.flags:
            outgoing.sent.index_copy_(
                0, self._sent_flags, moves[len(table.kept_sizes) :]
            )
        self._pending = collectives.start_messages(
            "muon/gather", outgoing.sent, self._gather
        )
        self._meter.gather_bytes += outgoing.sent.nbytes
        self._kept = outgoing.kept, moves[: len(table.kept_sizes)]

    def finish_gather(self) -> Staged:
        """The matrices of the round whose home this rank is."""
        table = self.table
        assert self._kept is not None, "a round that was not started"
        # frees the sent message before the next buffer is made
        received = self._received()
        elements, moves = self._kept
        self._kept = None
        if received is not None and table.received.flags:
            moves = torch.cat([moves, received.index_select(0, self._received_flags)])
            elements = self._assembled(elements, received)
        counts = moves.new_zeros(len(table.homes))
        if table.homes:
            counts.index_add_(0, self._places, moves)
        return Staged(elements, counts > 0, table.stacks, counts)

    def _kept_slices(self, kept: Tensor) -> Sequence[Tensor]:
        table = self.table
        if not table.in_place:
            return split_with_sizes(kept, table.kept_sizes)
        places = split_with_sizes(kept, table.staged_sizes)
        return [places[number] for number in table.kept_staged]

    def _assembled(self, kept: Tensor, received: Tensor) -> Tensor:
        table = self.table
        slices = [
            *self._kept_slices(kept),
            *split_with_sizes(received, table.received.sizes),
        ]
        staged = (
            kept if table.in_place else self._like.new_empty(sum(table.staged_sizes))
        )
        places = split_with_sizes(staged, table.staged_sizes)
        sources = [slices[table.staged_from[at]] for at in self._copied]
        _copy([places[at] for at in self._copied], sources)
        return staged

    def mark(self, staged: Staged, marks: Tensor) -> None:
        """Make the first element of each slice NaN where its result is not finite.

        By it every rank that holds a slice knows that the result is not to be
        applied (``rule.RoundRule.after_scatter``): so all of them do the same, and
        nothing more travels.

        Args:
            staged: the results.
            marks: for each of its matrices NaN, or -0.0, which changes no element.
        """
        elements, of_slices = staged.elements, marks.index_select(0, self._of_firsts)
        marked = elements.index_select(0, self._firsts).add_(of_slices)
        elements.index_copy_(0, self._firsts, marked)

    def start_scatter(self, staged: Staged) -> None:
        """Start to send the results, and take them out of ``staged``."""
        self._results, sent = self._parted(staged.taken())
        self._pending = collectives.start_messages("muon/scatter", sent, self._scatter)
        self._meter.scatter_bytes += self._scatter.sent * sent.element_size()

    def _parted(self, staged: Tensor) -> tuple[list[Tensor], Tensor]:
        """Results of the slices that are held here, and the message with all
        others.
        """
        table = self.table
        slices = split_with_sizes(staged, table.staged_sizes)
        if not table.results.counts:  # all are held here
            return list(slices), staged.new_empty(0)
        own = [slices[number] for number in table.kept_staged]
        outgoing = [slices[number] for number in table.scattered]
        sent = staged.new_empty(sum(table.results.sizes))
        parts = split_with_sizes(sent, table.results.sizes)
        in_message = [parts[number] for number in table.results.places]
        if table.in_place:
            _copy(in_message, outgoing)
            return own, sent
        kept = list(
            split_with_sizes(staged.new_empty(sum(table.kept_sizes)), table.kept_sizes)
        )
        _copy([*kept, *in_message], [*own, *outgoing])
        return kept, sent

    def finish_scatter(self) -> list[Tensor]:
        """The results of each slice that is held here, ``(n,)``."""
        results, self._results = self._results, []
        received = self._received()
        if received is not None:
            parts = split_with_sizes(received, self.table.returned.sizes)
            results = [*results, *parts]
        return [results[number] for number in self.table.result_of]

    def _received(self) -> Tensor | None:
        """Wait for the received elements, and release the sent ones; None without
        messages.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.wait()

    def forget(self) -> None:
        """Wait for messages under way, and release all of a step's elements."""
        self._received()
        self._kept = None
        self._results = []


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
