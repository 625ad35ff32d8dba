"""Matrices that several homes share: each has a strip, a range of the long side.

The Gram matrix of the short side is a sum over strips. So only squares of the short
side travel between the homes, and each applies the same polynomial to its strip
(``orthogonalize.strips``). A wide matrix comes to its homes in ranges of rows, whose
elements are contiguous wherever they lie, and its homes exchange them for columns
(``layout.Strip``). Where strips begin depends on their number alone: the result is the
same on any ranks. Plain integers.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from megatron_muon.orthogonalize.iteration import halves, makes_rows
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.homes import Work
from megatron_muon.planning.layout import (
    Block,
    MatrixShape,
    Parameter,
    Span,
    Strip,
    range_of,
)
from megatron_muon.settings.run import NODE

# Where every home multiplies all squares of the short side and the long side is shorter
# than this many short ones, they are most of the work, and the time model has no gain
# (docs/plan.md).
_LONG = 2
# With rows of squares others gain, too, by the time model, with so many strips or more.
_LARGE = 4
# Picoseconds of Newton-Schulz below which a matrix is not shared by itself: whole, it
# takes less than a seventh of what its homes wait for each other.
LEAST_SHARED_PS = 50_000_000
# Less than this is not worth other bits: the plan's time is within some 7 % of the time
# model's without experts, and further off with them.
_STEP_GAIN = Fraction(1, 100)
_LEAST_GAIN = Fraction(5, 100)
# A start that is so many times slower than the best one is not searched from. The
# search from it ends at the same numbers, by the models of test_choices, and at 16,384
# ranks it takes most of the plan's time.
_SLOW_START = Fraction(3, 2)
_NUMBER = 4  # bytes of a number in fp32
_NEAR = Fraction(9, 10)  # the edge of a shard may leave a few rows on another node
_EXPERTS = ".experts."  # there are always many of them


def in_strips(parameter: Parameter, counts: Sequence[int]) -> Parameter:
    """The parameter with each matrix cut into so many strips; with 1 it stays whole.

    A matrix is cut into ranges of rows, a wide one too, since its homes exchange them
    for columns. If TP cuts a wide one's columns into a multiple of as many parts, these
    parts are its strips. Experts' matrices stay whole, and so do those with a side
    shorter than the number of strips: each home adds rows of the short side's square.
    """
    if _EXPERTS in parameter.name:
        return parameter
    cut = [
        list(_cut(shape, parameter.column_parts, count))
        for shape, count in zip(parameter.matrices, counts, strict=True)
    ]
    if all(len(strips) == 1 for strips in cut):
        return parameter
    first = [sum(map(len, cut[:index])) for index in range(len(cut))]
    blocks = []
    for tp_rank, of_rank in enumerate(parameter.blocks):
        parts: list[Block] = []
        for block in of_rank:
            number = block.matrix
            parts += _of_block(block, cut[number], first[number], tp_rank)
        blocks.append(tuple(parts))
    matrices = tuple(shape for strips in cut for shape, _ in strips)
    return replace(parameter, matrices=matrices, blocks=tuple(blocks))


_Cut = tuple[MatrixShape, Span]  # a strip, and its rows of the whole matrix


def _cut(shape: MatrixShape, column_parts: int, count: int) -> Iterator[_Cut]:
    """The strips of a matrix; the matrix itself where it stays whole."""
    rows, cols = shape.rows, shape.cols
    if count < 2 or shape.column_blocks > 1 or min(rows, cols) < count:
        yield shape, Span(0, rows)
        return
    by_parts = cols > rows and column_parts % count == 0
    for number in range(count):
        name = f"{shape.name}[strip {number}]"
        if by_parts:
            strip = Strip(
                rows, cols, number, count, range_of(column_parts, number, count)
            )
            yield (
                replace(shape, name=name, cols=cols // count, strip=strip),
                Span(0, rows),
            )
            continue
        own = range_of(rows, number, count)
        strip = Strip(rows, cols, number, count)
        yield replace(shape, name=name, rows=own.size, strip=strip), own


def _of_block(
    block: Block, strips: Sequence[_Cut], first: int, tp_rank: int
) -> Iterator[Block]:
    """The parts of a block that are of each strip, in the order of rows."""
    start, stop = block.matrix_row, block.matrix_row + block.rows.size
    for number, (shape, rows) in enumerate(strips):
        parts = None if shape.strip is None else shape.strip.parts
        if parts is not None and not parts.start <= tp_rank < parts.stop:
            continue
        low = max(start, rows.start)
        high = min(stop, rows.stop)
        if low < high:
            local = Span(low - start, high - start).shift(block.rows.start)
            yield Block(first + number, local, low - rows.start)


def strip_homes(
    strips: Sequence[Strip | None], works: Sequence[Work], before: Sequence[int]
) -> Mapping[int, int]:
    """The homes of strips, by the index of the matrix.

    The ranks of a stage form teams of neighbours, so that a node's ranks share a
    matrix. A shared matrix goes to the team whose busiest rank has least work; of
    several to the one that holds most of it, then to the first. Its strips go to the
    team's ranks in order.

    Args:
        strips, works: of each matrix of the stage, in order; a whole one has no strip.
        before: flops that each rank of the stage has to do already.
    """
    size = len(before)
    loads = list(before)
    shared = [
        index
        for index, strip in enumerate(strips)
        if strip is not None and not strip.number
    ]
    homes: dict[int, int] = {}
    busiest: dict[
        int, list[int]
    ] = {}  # work of each team's busiest rank, by number of strips
    for first in sorted(shared, key=lambda index: (-works[index].load, index)):
        strip = strips[first]
        assert strip is not None
        members = range(first, first + strip.count)
        ranks = min(size, strip.count)  # of a team
        if strip.count not in busiest:
            teams = range(max(1, size // strip.count))
            busiest[strip.count] = [
                max(loads[at * ranks : (at + 1) * ranks]) for at in teams
            ]
        team = _team(busiest[strip.count], _held(members, works, ranks))
        for at, index in enumerate(members):
            home = homes[index] = team * ranks + at * ranks // strip.count
            loads[home] += works[index].load
            for count, tops in busiest.items():
                other = home // min(size, count)
                if other < len(tops):
                    tops[other] = max(tops[other], loads[home])
    return homes


def _team(busiest: Sequence[int], held: Mapping[int, int]) -> int:
    """Of the teams whose busiest rank has least, the one that holds most, then the
    first.
    """
    least = min(busiest)
    holders = [
        (-held[team], team) for team in held if busiest[team : team + 1] == [least]
    ]
    return min(holders)[1] if holders else busiest.index(least)


def _held(members: range, works: Sequence[Work], ranks: int) -> Mapping[int, int]:
    """Elements of a shared matrix that each team holds."""
    held: dict[int, int] = defaultdict(int)
    for index in members:
        for rank, elements in works[index].held.items():
            held[rank // ranks] += elements
    return held


@dataclass(frozen=True, slots=True)
class SharedMessages:
    """What the homes of a matrix send to each other at one time."""

    # numbers in fp32, rows of squares, or elements of the matrix as they travel
    kind: Literal["numbers", "squares", "elements"]
    sizes: Mapping[tuple[int, int], int]  # bytes by (sender, receiver)


@dataclass(frozen=True, slots=True)
class SharedMatrix:
    """A matrix that several homes orthogonalize together."""

    parameter: int  # index of its parameter in the plan
    homes: tuple[int, ...]  # rank of the stage that has each strip
    rows: int  # rows, cols: its size over all TP ranks
    cols: int
    # for each sum of squares, how often rows of squares are put together after it
    gathers: tuple[int, ...]
    itemsize: int  # bytes of an element of a square
    # bytes of an element that travels, where its strips come as rows; else 0
    row_itemsize: int = 0

    def messages(self) -> Iterator[SharedMessages]:
        """The messages between its homes, in their order.

        Each home sends
        - where strips come as rows, the other homes' columns of its rows;
        - three numbers for each of its strips;
        - for each sum of squares, the rows that others add, then the rows that it has
        added;
        - where homes make rows of squares, its rows, each time that these are put
        together; such squares travel in halves of their columns, always both of them;
        - one number more for each strip, whether its direction is finite;
        - where strips come as rows, the other homes' rows of its columns.
        """
        ranks = sorted(set(self.homes))
        short = min(self.rows, self.cols)
        rows: dict[int, int] = defaultdict(int)  # bytes of a square's first column
        for number, home in enumerate(self.homes):
            rows[home] += range_of(short, number, len(self.homes)).size * self.itemsize
        strips = {rank: self.homes.count(rank) for rank in ranks}
        pairs = list(itertools.permutations(ranks, 2))
        if not pairs:
            return
        there = self._rows_for_columns(pairs)
        if there:
            yield SharedMessages("elements", there)
        one = {pair: _NUMBER * strips[pair[0]] for pair in pairs}
        yield SharedMessages("numbers", {pair: 3 * size for pair, size in one.items()})
        columns = [short]
        if any(self.gathers):
            columns = [stop - start for start, stop in halves(short)]
        for gathers in self.gathers:
            for width in columns:
                sizes = {(a, b): strips[a] * rows[b] * width for a, b in pairs}
                yield SharedMessages("squares", sizes)
            for width in columns * (1 + gathers):
                sizes = {(a, b): rows[a] * width for a, b in pairs}
                yield SharedMessages("squares", sizes)
        yield SharedMessages("numbers", one)
        if there:
            yield SharedMessages("elements", {(a, b): there[b, a] for a, b in pairs})

    def _rows_for_columns(
        self, pairs: Sequence[tuple[int, int]]
    ) -> Mapping[tuple[int, int], int]:
        """Bytes of the receiver's columns in the sender's rows; empty where strips come
        as they are iterated on.
        """
        if not self.row_itemsize:
            return {}
        rows: dict[int, int] = defaultdict(int)
        cols: dict[int, int] = defaultdict(int)
        for number, home in enumerate(self.homes):
            rows[home] += range_of(self.rows, number, len(self.homes)).size
            cols[home] += range_of(self.cols, number, len(self.homes)).size
        return {(a, b): rows[a] * cols[b] * self.row_itemsize for a, b in pairs}


class Kind(NamedTuple):
    """Matrices that get as many strips."""

    rows: int
    cols: int
    own: str = ""  # settings of the iteration by pattern
    # Less than ``_NEAR`` of it lies on one node. Each home of its strips receives a
    # part of it, over a link of its own.
    is_far: bool = False

    @property
    def short(self) -> int:
        """Its short side."""
        return min(self.rows, self.cols)

    def near(self) -> Kind:
        """The kind of the others of this size."""
        return self._replace(is_far=False)


Counts = Mapping[Kind, int]  # strips of the matrices of a kind; others are whole


def is_far(held: Mapping[int, int], neighbours: int) -> bool:
    """``Kind.is_far`` of a matrix of which ranks hold these elements."""
    by_node: dict[int, int] = defaultdict(int)
    for rank, elements in held.items():
        by_node[rank // neighbours] += elements
    return max(by_node.values()) < _NEAR * sum(by_node.values())


def with_few_far(kinds: Sequence[Sequence[Kind]]) -> list[list[Kind]]:
    """The same kinds, those that are far apart from others only where they are fewer.

    If most of a shape are far, the links decide for all of them, and fewer kinds take
    less time to plan.
    """
    number = Counter(itertools.chain.from_iterable(kinds))

    def apart(kind: Kind) -> Kind:
        near = kind.near()
        return kind if number[kind] < number[near] else near

    return [list(map(apart, own)) for own in kinds]


def can_share(rows: int, cols: int, count: int, numerics: Numerics) -> bool:
    """Whether so many strips pay: of a long matrix, or of a large one with rows of
    squares.
    """
    if max(rows, cols) >= _LONG * min(rows, cols):
        return True
    return count >= _LARGE and makes_rows(rows, cols, count, numerics)


def choose_counts(
    kinds: Sequence[Kind],
    size: int,
    time_of: Callable[[Counts], int],
    can: Callable[[Kind, int], bool],
) -> Counts:
    """How many strips the matrices of each kind get, so that the stage takes least
    time.

    The search starts from 8 strips of all kinds with a long short side that can have
    them, from 4, from 2 and from whole matrices, but not where a start takes more than
    ``_SLOW_START`` times as long as the best one. One kind at a time gets the other
    number that gains most, until none gains ``_STEP_GAIN``, as a later start's end must
    on that of an earlier one: within that, smaller parts balance better than the time
    tells. A kind that gains no more than that stays whole. Kinds that are far go with
    those that are near, until a number of their own gains. If all of it gains less than
    ``_LEAST_GAIN`` on whole matrices, none is shared.

    Args:
        kinds: of all matrices.
        size: number of ranks in the stage.
        time_of: time of the stage.
        can: whether matrices of a kind can have a number of strips (``can_share``).
    """
    numbers = [1 << at for at in range(min(NODE, size).bit_length())]
    possible = {
        kind: [count for count in numbers if count == 1 or can(kind, count)]
        for kind in dict.fromkeys([*map(Kind.near, kinds), *kinds])
    }
    known: dict[frozenset[tuple[Kind, int]], int] = {}

    def timed(counts: Counts) -> int:
        """A search comes to the same numbers from several starts."""
        key = frozenset(one for one in counts.items() if one[1] > 1 or one[0].is_far)
        if key not in known:
            known[key] = time_of(counts)
        return known[key]

    longest = max(kind.short for kind in possible)
    large = [kind for kind in possible if 2 * kind.short >= longest and not kind.is_far]
    starts = [
        {kind: start for kind in large if start in possible[kind]}
        for start in reversed(numbers)
    ]
    most = min(map(timed, starts)) * _SLOW_START
    found = [_improved(each, possible, timed) for each in starts if timed(each) <= most]
    best, least = found[0]
    for others, time in found[1:]:
        if time <= least * (1 - _STEP_GAIN):
            best, least = others, time
    for kind in best:
        whole = {**best, kind: 1}
        best = whole if timed(whole) <= least * (1 + _STEP_GAIN) else best
    if timed(best) > timed({}) * (1 - _LEAST_GAIN):
        return {}
    return {kind: count for kind, count in best.items() if count > 1 or kind.is_far}


def _improved(
    counts: Counts,
    possible: Mapping[Kind, Sequence[int]],
    time_of: Callable[[Counts], int],
) -> tuple[Counts, int]:
    """The numbers of ``choose_counts`` that a search from some others ends at, and
    their time.
    """
    now: Counts = counts
    best = time_of(now)
    while True:
        for are_far in (False, True):
            tried = [
                {**now, kind: count}
                for kind, known in possible.items()
                if kind.is_far == are_far
                for count in known
                if count != now.get(kind, 1) or are_far
            ]
            times = [(time_of(each), at) for at, each in enumerate(tried)]
            time, at = min(times, default=(best, 0))
            if time < best and time <= best * (1 - _STEP_GAIN):
                break
        else:
            return now, best
        now, best = tried[at], time
