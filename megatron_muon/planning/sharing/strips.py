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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_muon.orthogonalize.iteration import makes_rows
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.homes import Work
from megatron_muon.planning.layout import (
    Block,
    Matrix,
    Parameter,
    Span,
    Strip,
    range_of,
)

# Where every home multiplies all squares of the short side and the long side is shorter
# than this many short ones, they are most of the work, and the time model has no gain
# (docs/plan.md).
_LONG = 2
# With rows of squares others gain, too, by the time model, with so many strips or more.
_LARGE = 4
_NUMBER = 4  # bytes of a number in fp32
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


_Cut = tuple[Matrix, Span]  # a strip, and its rows of the whole matrix


def _cut(shape: Matrix, column_parts: int, count: int) -> Iterator[_Cut]:
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
        together;
        - one number more for each strip, whether its direction is finite;
        - where strips come as rows, the other homes' rows of its columns.
        """
        ranks = sorted(set(self.homes))
        short = min(self.rows, self.cols)
        rows = self._of_homes(short)
        row_bytes = short * self.itemsize  # of a square
        strips = {rank: self.homes.count(rank) for rank in ranks}
        pairs = list(itertools.permutations(ranks, 2))
        if not pairs:
            return
        there = self._rows_for_columns(pairs)
        if there:
            yield SharedMessages("elements", there)
        one = {pair: _NUMBER * strips[pair[0]] for pair in pairs}
        yield SharedMessages("numbers", {pair: 3 * size for pair, size in one.items()})
        for gathers in self.gathers:
            sizes = {(a, b): strips[a] * rows[b] * row_bytes for a, b in pairs}
            yield SharedMessages("squares", sizes)
            for _ in range(1 + gathers):
                sizes = {(a, b): rows[a] * row_bytes for a, b in pairs}
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
        rows = self._of_homes(self.rows)
        cols = self._of_homes(self.cols)
        return {(a, b): rows[a] * cols[b] * self.row_itemsize for a, b in pairs}

    def _of_homes(self, side: int) -> Mapping[int, int]:
        """How much of a side of so many elements each home has."""
        shares = Counter[int]()
        for number, home in enumerate(self.homes):
            shares[home] += range_of(side, number, len(self.homes)).size
        return shares


def can_share(rows: int, cols: int, count: int, numerics: Numerics) -> bool:
    """Whether so many strips pay: of a long matrix, or of a large one with rows of
    squares.
    """
    if max(rows, cols) >= _LONG * min(rows, cols):
        return True
    return count >= _LARGE and makes_rows(rows, cols, count, numerics)
