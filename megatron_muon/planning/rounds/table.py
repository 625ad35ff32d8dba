"""One rank's part of a round of the exchange, as integers: made once, used in every step.

A run is a segment of the plan that this rank holds. Buffers of a round are flat: each list of sizes
below cuts one of them into parts, from the first element to the last.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_muon.planning.rank_plan import RankPlan, RankRound
from megatron_muon.planning.segments import Matrix, Segment, gather_message


@dataclass(frozen=True, slots=True)
class Alike:
    """Matrices of one layout that lie one after another in the staged buffer.

    Attributes:
        matrices: their indices in the plan.
        like: the first of them; all have its layout, or they are strips of one matrix.
        start: place of the first one in the staged buffer, in elements.
        strips: where they are strips of a matrix that several homes share: all of its strips, in
            order. Empty for whole matrices.
    """

    matrices: tuple[int, ...]
    like: Matrix
    start: int
    strips: tuple[Matrix, ...] = ()

    @property
    def own_strips(self) -> list[Matrix]:
        """Those of ``strips`` that are in ``matrices``."""
        return [strip for strip in self.strips if strip.home == self.like.home]


# Where at most this share of a home's elements comes from others, and goes back to them, its own
# are written where they are staged and stay there.
_FEW = 8


def stays_in_place(kept: int, arriving: int, leaving: int) -> bool:
    """Whether a home stages a round's matrices where it writes its own runs of them.

    Then it copies only what travels, and the places of what arrives wait empty. Else buffers of
    its own runs are copied with the rest, so that none is larger than what it holds.

    Args:
        kept: elements of its matrices that a rank holds itself.
        arriving: elements that it receives.
        leaving: elements of directions that it sends.
    """
    return _FEW * max(arriving, leaving) <= kept + arriving


@dataclass(frozen=True, slots=True)
class RoundTable:
    """One rank's part of a round.

    Attributes:
        parameters: ``(index, sizes of its runs)`` of each with a piece here. Runs are numbered in
            this order.
        matrices: the plan's index of each run's matrix.
        moving: numbers of the runs that go to a home: the kept ones in staged order, then the sent
            ones in the order of ``sent_sizes``.
        kept_sizes: sizes of the runs that are home already.
        sent_sizes: sizes of the parts of the message to homes: each peer's runs, then their flags.
        sent_parts: numbers of that message's parts that are runs.
        sent_to, received_from: ``(rank of the stage, elements)`` by peer, flags included.
        sent_flags, received_flags: the places of flags in the messages.
        received_sizes: sizes of the parts of the message that arrives, as ``sent_sizes``.
        homes: the matrices whose home this rank is, in staged order.
        alike: the same matrices, grouped by layout.
        staged_sizes: sizes of the staged buffer's parts.
        staged_places: for each of these parts, the place of its matrix in ``homes``.
        staged_from: for each staged part, its number among the kept runs and, after them, the parts
            of ``received_sizes``.
        places: for each kept run and each one that arrives, the place of its matrix in ``homes``.
        kept_parts: numbers of the staged parts that are kept runs.
        in_place: kept runs are written where they are staged (``stays_in_place``).
        directions_to: ``(rank of the stage, elements)`` of the ranks that get directions from here.
        direction_parts: numbers of the staged parts that are sent, in the message's order.
        directions_from: the same for the ranks that send directions to this one.
        direction_sizes: sizes of the parts of the message that comes back.
        direction_of: for each run, its number among the kept runs and, after them, the parts of
            ``direction_sizes``.
    """

    parameters: tuple[tuple[int, tuple[int, ...]], ...]
    matrices: tuple[int, ...]
    moving: tuple[int, ...]
    kept_sizes: tuple[int, ...]
    sent_sizes: tuple[int, ...]
    sent_parts: tuple[int, ...]
    sent_to: tuple[tuple[int, int], ...]
    received_from: tuple[tuple[int, int], ...]
    sent_flags: tuple[int, ...]
    received_flags: tuple[int, ...]
    received_sizes: tuple[int, ...]
    homes: tuple[int, ...]
    alike: tuple[Alike, ...]
    staged_sizes: tuple[int, ...]
    staged_places: tuple[int, ...]
    staged_from: tuple[int, ...]
    places: tuple[int, ...]
    kept_parts: tuple[int, ...]
    in_place: bool
    directions_to: tuple[tuple[int, int], ...]
    direction_parts: tuple[int, ...]
    directions_from: tuple[tuple[int, int], ...]
    direction_sizes: tuple[int, ...]
    direction_of: tuple[int, ...]

    @property
    def peers(self) -> set[int]:
        """The ranks of the stage that this one exchanges messages with."""
        counts = (self.sent_to, self.received_from, self.directions_to, self.directions_from)
        return {rank for of_ranks in counts for rank, _ in of_ranks}

    @property
    def sharers(self) -> set[int]:
        """The ranks of the stage, this one too, that it shares matrices with."""
        return {strip.home for alike in self.alike for strip in alike.strips}

    @property
    def travels(self) -> bool:
        """This rank sends or receives something in the round."""
        return bool(self.peers)


def round_tables(plan: RankPlan, matrices: Sequence[Matrix]) -> list[RoundTable]:
    """The tables of every round, for one rank of the stage.

    Args:
        plan: that rank's part of the plan.
        matrices: all matrices of the stage.
    """
    return [_table(round, matrices) for round in plan.rounds]


def _table(routes: RankRound, matrices: Sequence[Matrix]) -> RoundTable:
    alike = list(_by_layout(matrices, routes.homes))
    homes = [index for group in alike for index in group.matrices]
    place = {index: at for at, index in enumerate(homes)}

    def in_staged_order(segment: Segment) -> tuple[int, int]:
        return place[segment.matrix], segment.start

    kept = sorted(routes.kept, key=in_staged_order)
    to_homes, arriving = _joined(routes.gather_to), _joined(routes.gather_from)
    back, returning = _joined(routes.scatter_to), _joined(routes.scatter_from)
    runs = sorted([*kept, *returning], key=lambda s: (s.parameter, s.elements))
    number = {id(segment): at for at, segment in enumerate(runs)}
    sent_sizes, sent_flags = _with_flags(routes.gather_to)
    received_sizes, received_flags = _with_flags(routes.gather_from)
    source = {
        **{id(segment): at for at, segment in enumerate(kept)},
        **_numbers(routes.gather_from, first=len(kept)),
    }
    parts = sorted([*kept, *arriving], key=in_staged_order)
    part_of = {(s.matrix, s.start): at for at, s in enumerate(parts)}
    direction = {id(segment): at for at, segment in enumerate([*kept, *returning])}
    return RoundTable(
        parameters=tuple(
            (index, tuple(s.elements.size for s in held))
            for index, held in itertools.groupby(runs, key=lambda s: s.parameter)
        ),
        matrices=tuple(segment.matrix for segment in runs),
        moving=tuple(number[id(segment)] for segment in (*kept, *to_homes)),
        kept_sizes=_sizes(kept),
        sent_sizes=sent_sizes,
        sent_parts=tuple(_numbers(routes.gather_to).values()),
        sent_to=_counts(routes.gather_to, flags=True),
        received_from=_counts(routes.gather_from, flags=True),
        sent_flags=sent_flags,
        received_flags=received_flags,
        received_sizes=received_sizes,
        homes=tuple(homes),
        alike=tuple(alike),
        staged_sizes=_sizes(parts),
        staged_places=tuple(place[segment.matrix] for segment in parts),
        staged_from=tuple(source[id(segment)] for segment in parts),
        places=tuple(place[segment.matrix] for segment in (*kept, *arriving)),
        kept_parts=tuple(part_of[s.matrix, s.start] for s in kept),
        in_place=stays_in_place(*(sum(_sizes(segments)) for segments in (kept, arriving, back))),
        directions_to=_counts(routes.scatter_to),
        direction_parts=tuple(part_of[s.matrix, s.start] for s in back),
        directions_from=_counts(routes.scatter_from),
        direction_sizes=_sizes(returning),
        direction_of=tuple(direction[id(segment)] for segment in runs),
    )


def _by_layout(matrices: Sequence[Matrix], homes: Sequence[int]) -> Iterable[Alike]:
    """The matrices whose home a rank is, in the order in which it orthogonalizes them.

    Those that it shares come first, in the order of the plan: so all of their homes meet at each of
    them in one order.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    shared: dict[int, list[int]] = defaultdict(list)
    for index in homes:
        matrix = matrices[index]
        if matrix.strip is not None:
            shared[index - matrix.strip.number].append(index)
            continue
        columns = (matrix.column_parts, matrix.column_blocks, matrix.units)
        layout = (matrix.rows, matrix.cols, *columns)
        groups[layout].append(index)
    start = 0
    for first, indices in sorted(shared.items()):
        strip = matrices[first].strip
        assert strip is not None
        strips = tuple(matrices[first : first + strip.count])
        yield Alike(tuple(sorted(indices)), matrices[indices[0]], start, strips)
        start += sum(matrices[index].numel for index in indices)
    for _, indices in sorted(groups.items()):
        like = matrices[indices[0]]
        yield Alike(tuple(indices), like, start)
        start += len(indices) * like.numel


def _joined(segments: dict[int, list[Segment]]) -> list[Segment]:
    """The segments of all ranks, in the order of ranks."""
    return [segment for rank in sorted(segments) for segment in segments[rank]]


def _sizes(segments: Sequence[Segment]) -> tuple[int, ...]:
    return tuple(segment.elements.size for segment in segments)


def _counts(
    segments: dict[int, list[Segment]], *, flags: bool = False
) -> tuple[tuple[int, int], ...]:
    """Elements by rank; with ``flags``, those of its message: see ``_with_flags``."""
    return tuple((rank, _elements(segments[rank], flags=flags)) for rank in sorted(segments))


def _elements(segments: Sequence[Segment], *, flags: bool = True) -> int:
    elements = sum(_sizes(segments))
    return gather_message(elements, len(segments)) if flags else elements


def _with_flags(
    segments: dict[int, list[Segment]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of a message's parts (each rank's segments, then their flags), and places of flags.

    The last of a rank's parts has its flags and fills its message.
    """
    sizes: list[int] = []
    places: list[int] = []
    start = 0
    for rank in sorted(segments):
        own = _sizes(segments[rank])
        elements = _elements(segments[rank])
        places += range(start + sum(own), start + sum(own) + len(own))
        sizes += [*own, elements - sum(own)]
        start += elements
    return tuple(sizes), tuple(places)


def _numbers(segments: dict[int, list[Segment]], first: int = 0) -> dict[int, int]:
    """The number of each segment among the parts of ``_with_flags``, counted from ``first``."""
    numbers: dict[int, int] = {}
    for rank in sorted(segments):
        for segment in segments[rank]:
            numbers[id(segment)] = first
            first += 1
        first += 1  # the flags
    return numbers
