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

from megatron_muon.planning.rounds.rank_plan import RankPlan, RankRound
from megatron_muon.planning.slices import Matrix, Slice, gather_message
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


@dataclass(frozen=True, slots=True)
class RoundTable:
    """One rank's part of a round."""

    # (index, sizes of its slices) of each with a shard here. Slices are numbered in
    # this order.
    parameters: tuple[tuple[int, tuple[int, ...]], ...]
    matrices: tuple[int, ...]  # the plan's index of each slice's matrix
    # numbers of the slices that go to a home: the kept ones in staged order, then the
    # sent ones in the order of sent_sizes
    outgoing: tuple[int, ...]
    kept_sizes: tuple[int, ...]  # sizes of the slices that are home already
    # sizes in the message to homes: each peer's slices, then their flags
    sent_sizes: tuple[int, ...]
    sent_slices: tuple[int, ...]  # numbers of those of these sizes that are slices
    # sent_to, received_from: (rank of the stage, elements) by peer, flags included
    sent_to: tuple[tuple[int, int], ...]
    received_from: tuple[tuple[int, int], ...]
    # sent_flags, received_flags: the places of flags in the messages
    sent_flags: tuple[int, ...]
    received_flags: tuple[int, ...]
    received_sizes: tuple[int, ...]  # sizes in the message that arrives, as sent_sizes
    homes: tuple[int, ...]  # the matrices whose home this rank is, in staged order
    stacks: tuple[Stack, ...]  # the same matrices, grouped by layout
    staged_sizes: tuple[int, ...]  # sizes of the slices in the staged buffer
    # for each of these, the place of its matrix in homes
    staged_places: tuple[int, ...]
    # for each of these, its number among the kept slices and, after them,
    # received_sizes
    staged_from: tuple[int, ...]
    # for each kept slice and each one that arrives, the place of its matrix in homes
    places: tuple[int, ...]
    kept_staged: tuple[int, ...]  # numbers of the staged slices that are kept
    in_place: bool  # kept slices are written where they are staged (stays_in_place)
    # results_to, results_from: (rank of the stage, elements without gaps) of the ranks
    # that get results from here, and of those that send some
    results_to: tuple[tuple[int, int], ...]
    # numbers of the staged slices that are sent, in the message's order
    scattered: tuple[int, ...]
    # sizes in this message: each peer's slices, then a gap, of 0 or more elements, up
    # to where the next one's start; no gap after the last
    scattered_sizes: tuple[int, ...]
    scattered_slices: tuple[int, ...]  # numbers of those of these sizes that are slices
    results_from: tuple[tuple[int, int], ...]
    result_sizes: tuple[int, ...]  # sizes in the message that comes back, with gaps
    # for each slice, its number among the kept ones and, after them, result_sizes
    result_of: tuple[int, ...]

    @property
    def peers(self) -> set[int]:
        """The ranks of the stage that this one exchanges messages with."""
        counts = (
            self.sent_to,
            self.received_from,
            self.results_to,
            self.results_from,
        )
        return {rank for of_ranks in counts for rank, _ in of_ranks}

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
    leaving = _message(routes.gather_to)
    arriving = _message(routes.gather_from)
    back = _message(routes.scatter_to, flags=False)
    returning = _message(routes.scatter_from, flags=False)
    held = sorted(
        [*kept, *returning.slices], key=lambda one: (one.parameter, one.elements)
    )
    number = {id(one): at for at, one in enumerate(held)}
    staged = sorted([*kept, *arriving.slices], key=in_staged_order)
    in_staged = {(one.matrix, one.start): at for at, one in enumerate(staged)}
    source = _sources(kept, arriving)
    result = _sources(kept, returning)
    return RoundTable(
        parameters=tuple(
            (index, _sizes(list(of_one)))
            for index, of_one in itertools.groupby(held, key=lambda one: one.parameter)
        ),
        matrices=tuple(one.matrix for one in held),
        outgoing=tuple(number[id(one)] for one in (*kept, *leaving.slices)),
        kept_sizes=_sizes(kept),
        sent_sizes=tuple(leaving.sizes),
        sent_slices=tuple(leaving.places),
        sent_to=tuple(leaving.counts),
        received_from=tuple(arriving.counts),
        sent_flags=tuple(leaving.flags),
        received_flags=tuple(arriving.flags),
        received_sizes=tuple(arriving.sizes),
        homes=tuple(homes),
        stacks=tuple(stacks),
        staged_sizes=_sizes(staged),
        staged_places=tuple(place[one.matrix] for one in staged),
        staged_from=tuple(source[id(one)] for one in staged),
        places=tuple(place[one.matrix] for one in (*kept, *arriving.slices)),
        kept_staged=tuple(in_staged[one.matrix, one.start] for one in kept),
        in_place=stays_in_place(
            *(sum(_sizes(some)) for some in (kept, arriving.slices, back.slices))
        ),
        results_to=tuple(back.counts),
        scattered=tuple(in_staged[one.matrix, one.start] for one in back.slices),
        scattered_sizes=tuple(back.sizes[:-1]),
        scattered_slices=tuple(back.places),
        results_from=tuple(returning.counts),
        result_sizes=tuple(returning.sizes[:-1]),
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


class _Message(NamedTuple):
    """Slices to or from other ranks, in the order of ranks."""

    slices: list[Slice]
    counts: list[tuple[int, int]]  # (rank, elements)
    sizes: list[int]  # each rank's slices, then their flags or a gap, which fill it up
    flags: list[int]  # places of flags in the buffer, where it has some
    places: list[int]  # of each slice among the sizes


def _message(slices: Mapping[int, list[Slice]], *, flags: bool = True) -> _Message:
    """The message of slices by rank, with a flag for each.

    Without flags a gap, which does not travel, takes their place: so each rank's part
    starts as ``collectives.consecutive`` places it.
    """
    made = _Message([], [], [], [], [])
    start = 0
    for rank in sorted(slices):
        own = _sizes(slices[rank])
        elements = sum(own)
        filled = gather_message(elements, len(own) * flags)
        made.slices.extend(slices[rank])
        made.counts.append((rank, filled if flags else elements))
        made.flags.extend(start + elements + at for at in range(len(own)))
        made.places.extend(len(made.sizes) + at for at in range(len(own)))
        made.sizes.extend([*own, filled - elements])
        start += filled
    return made


def _sources(kept: Sequence[Slice], message: _Message) -> dict[int, int]:
    """The place of each slice among the kept ones and, after them, the sizes of a
    message, by its id.
    """
    places = {id(one): at for at, one in enumerate(kept)}
    for one, at in zip(message.slices, message.places, strict=True):
        places[id(one)] = len(kept) + at
    return places


def _sizes(slices: Sequence[Slice]) -> tuple[int, ...]:
    return tuple(one.elements.size for one in slices)
