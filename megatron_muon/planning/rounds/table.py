"""One rank's part of a round of the exchange, as integers: made once, used in every
step.

Buffers of a round are flat: each list of sizes below cuts one of them, from the first
element to the last.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_muon.planning.layout import Matrix
from megatron_muon.planning.rounds.rank_plan import RankPlan, RankRound
from megatron_muon.planning.slices import Slice, gather_message
from megatron_muon.settings.patterns import AT_HOMES, only


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices of one layout and iteration that lie one after another in the staged
    buffer.
    """

    matrices: tuple[int, ...]  # their indices in the plan
    # the first of them: all have its layout, or they are strips of one matrix
    layout: Matrix
    start: int  # place of the first one in the staged buffer, in elements
    # where they are strips of a matrix that several homes share: all of its strips, in
    # order. Empty for whole matrices.
    strips: tuple[Matrix, ...] = ()

    @property
    def own_strips(self) -> list[Matrix]:
        """The strips whose home this rank is."""
        return [strip for strip in self.strips if strip.home == self.layout.home]


# Where at most an eighth of a home's elements comes from others, and goes back to them,
# its own are written where they are staged and stay there.
_FEW = 8


def stays_in_place(kept: int, arriving: int, leaving: int) -> bool:
    """Whether a home stages a round's matrices where it writes its own slices of them.

    Then it copies only what travels, and the places of what arrives wait empty. Else
    buffers of its own slices are copied with the rest, so that none is larger than what
    it holds.

    Args:
        kept: elements of its matrices that a rank holds itself.
        arriving: elements that it receives.
        leaving: elements of results that it sends.
    """
    return _FEW * max(arriving, leaving) <= kept + arriving


class Message(NamedTuple):
    """Slices, or their results, to or from other ranks, in the order of ranks."""

    slices: list[Slice]
    counts: list[tuple[int, int]]  # (rank, elements)
    # of each rank its slices' sizes, and then that of their flags, or of a gap up to
    # where the next one's start. No gap is after the last.
    sizes: list[int]
    flags: list[int]  # places of flags in the buffer, where it has some
    places: list[int]  # of each slice among the sizes


@dataclass(frozen=True, slots=True)
class RoundTable:
    """One rank's part of a round."""

    # (index, sizes of its slices) of each with a shard here. Slices are numbered in
    # this order.
    parameters: tuple[tuple[int, tuple[int, ...]], ...]
    slices: tuple[Slice, ...]  # the slices held here
    # numbers of the slices that go to a home: the kept ones in staged order, then the
    # sent ones
    outgoing: tuple[int, ...]
    kept_sizes: tuple[int, ...]  # sizes of the slices that are home already
    # sent, received: slices on their way to homes, with a flag for each
    sent: Message
    received: Message
    homes: tuple[int, ...]  # the matrices whose home this rank is, in staged order
    stacks: tuple[Stack, ...]  # the same matrices, grouped by layout
    staged_sizes: tuple[int, ...]  # sizes of the slices in the staged buffer
    # for each of these, the place of its matrix in homes
    staged_places: tuple[int, ...]
    # for each of these, its number among the kept slices and, after them, the sizes
    # received
    staged_from: tuple[int, ...]
    # for each kept slice and each one that arrives, the place of its matrix in homes
    places: tuple[int, ...]
    kept_staged: tuple[int, ...]  # numbers of the staged slices that are kept
    in_place: bool  # kept slices are written where they are staged (stays_in_place)
    # results, returned: of the slices that are elsewhere, and of those held here
    results: Message
    returned: Message
    # numbers of the staged slices whose results are sent, in the message's order
    scattered: tuple[int, ...]
    # for each slice, its number among the kept ones and, after them, the sizes returned
    result_of: tuple[int, ...]

    @property
    def matrices(self) -> list[int]:
        """The plan's index of each slice's matrix."""
        return [one.matrix for one in self.slices]

    @property
    def peers(self) -> set[int]:
        """The ranks of the stage that this one exchanges messages with."""
        messages = (self.sent, self.received, self.results, self.returned)
        counts = itertools.chain.from_iterable(one.counts for one in messages)
        return {rank for rank, _ in counts}

    @property
    def sharers(self) -> set[int]:
        """The ranks of the stage, this one too, that it shares matrices with."""
        return {strip.home for stack in self.stacks for strip in stack.strips}

    @property
    def travels(self) -> bool:
        """This rank sends or receives slices or results in the round."""
        return bool(self.peers)


def round_tables(plan: RankPlan, matrices: Sequence[Matrix]) -> list[RoundTable]:
    """The tables of every round, for one rank of the stage, of which these are all
    matrices.
    """
    return [_table(round, matrices) for round in plan.rounds]


def _table(routes: RankRound, matrices: Sequence[Matrix]) -> RoundTable:
    stacks = list(_by_layout(matrices, routes.homes))
    homes = [index for stack in stacks for index in stack.matrices]
    place = {index: at for at, index in enumerate(homes)}

    def in_staged_order(one: Slice) -> tuple[int, int]:
        return place[one.matrix], one.start

    kept = sorted(routes.kept, key=in_staged_order)
    sent = _message(routes.away, to_homes=True)
    received = _message(routes.guests, to_homes=True)
    results = _message(routes.guests, to_homes=False)
    returned = _message(routes.away, to_homes=False)
    held = sorted(
        [*kept, *returned.slices], key=lambda one: (one.parameter, one.elements)
    )
    number = {id(one): at for at, one in enumerate(held)}
    staged = sorted([*kept, *received.slices], key=in_staged_order)
    in_staged = {(one.matrix, one.start): at for at, one in enumerate(staged)}
    source = _sources(kept, received)
    result = _sources(kept, returned)
    return RoundTable(
        parameters=tuple(
            (index, _sizes(list(of_one)))
            for index, of_one in itertools.groupby(held, key=lambda one: one.parameter)
        ),
        slices=tuple(held),
        outgoing=tuple(number[id(one)] for one in (*kept, *sent.slices)),
        kept_sizes=_sizes(kept),
        sent=sent,
        received=received,
        homes=tuple(homes),
        stacks=tuple(stacks),
        staged_sizes=_sizes(staged),
        staged_places=tuple(place[one.matrix] for one in staged),
        staged_from=tuple(source[id(one)] for one in staged),
        places=tuple(place[one.matrix] for one in (*kept, *received.slices)),
        kept_staged=tuple(in_staged[one.matrix, one.start] for one in kept),
        in_place=stays_in_place(
            *(sum(_sizes(some)) for some in (kept, received.slices, results.slices))
        ),
        results=results,
        returned=returned,
        scattered=tuple(in_staged[one.matrix, one.start] for one in results.slices),
        result_of=tuple(result[id(one)] for one in held),
    )


def _by_layout(matrices: Sequence[Matrix], homes: Sequence[int]) -> Iterable[Stack]:
    """The matrices whose home a rank is, in the order in which it orthogonalizes them.

    Those that it shares come first, in the order of the plan: so all of their homes
    meet at each of them in one order.
    """
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    shared: dict[int, list[int]] = defaultdict(list)
    for index in homes:
        matrix = matrices[index]
        if matrix.strip is not None:
            shared[index - matrix.strip.number].append(index)
            continue
        columns = (matrix.column_parts, matrix.column_blocks, matrix.units)
        at_home = only(matrix.own, AT_HOMES)
        groups[(matrix.rows, matrix.cols, *columns, at_home)].append(index)
    start = 0
    for first, indices in sorted(shared.items()):
        strip = matrices[first].strip
        assert strip is not None
        strips = tuple(matrices[first : first + strip.count])
        yield Stack(tuple(sorted(indices)), matrices[indices[0]], start, strips)
        start += sum(matrices[index].numel for index in indices)
    for _, indices in sorted(groups.items()):
        layout = matrices[indices[0]]
        yield Stack(tuple(indices), layout, start)
        start += len(indices) * layout.numel


def _message(slices: Mapping[int, list[Slice]], *, to_homes: bool) -> Message:
    """The message of slices by rank, to their homes or with the results.

    To homes a flag for each slice comes behind a rank's, and no replica travels. Among
    results a gap, which does not travel, takes the place of flags: so each rank's part
    starts as ``collectives.consecutive`` places it.
    """
    made = Message([], [], [], [], [])
    start = 0
    for rank in sorted(slices):
        some = [one for one in slices[rank] if not (to_homes and one.replica)]
        if not some:
            continue
        own = _sizes(some)
        elements = sum(own)
        filled = gather_message(elements, len(own) * to_homes)
        made.slices.extend(some)
        made.counts.append((rank, filled if to_homes else elements))
        made.flags.extend(start + elements + at for at in range(len(own)))
        made.places.extend(len(made.sizes) + at for at in range(len(own)))
        made.sizes.extend([*own, filled - elements])
        start += filled
    if not to_homes:
        del made.sizes[-1:]
    return made


def _sources(kept: Sequence[Slice], message: Message) -> dict[int, int]:
    """The place of each slice among the kept ones and, after them, the sizes of a
    message, by its id.
    """
    places = {id(one): at for at, one in enumerate(kept)}
    for one, at in zip(message.slices, message.places, strict=True):
        places[id(one)] = len(kept) + at
    return places


def _sizes(slices: Sequence[Slice]) -> tuple[int, ...]:
    return tuple(one.elements.size for one in slices)
