"""Homes: which rank orthogonalizes which matrix. Plain integers, the same on every
rank.

A home costs its rank time: for Newton-Schulz at the rank's speed, and on its link for
the slices that it lacks and for the results that it sends back. (What others send is
not counted.) Both speeds are settings, never measured here, and times are exact
integers, so every rank and every restart finds the same homes.

Only work decides whether a matrix leaves the rank that holds most of it: it does where
that rank would pass ``HOME_SLACK``. If bytes counted too, ranks that receive slices
would give away matrices that they hold whole, and more bytes would move. Time decides
where it goes. Candidates are the rank with the least work of the holder's neighbours (a
node's GPUs), or of all if that one would pass ``HOME_SLACK``, and every rank that holds
some of it and stays within ``HOME_LIMIT``. So whatever the speeds, no rank has more
work than ``HOME_LIMIT`` × max(mean, largest matrix), or 4/3 of the busiest rank's in
the optimal assignment, whichever is more (``test_homes.py``).

A stage's optimizers have homes on the same ranks. The dense one chooses first, that of
the experts sees what every rank has by then (``Loads``), and the mean is one of both.
So a rank with a large dense matrix gives experts away, and a rank with few dense ones
takes them. Experts are many alike: every rank keeps its own of one size before any gets
those of others, so that fewer move.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.settings.config import HomePolicy
from megatron_muon.settings.run import NODE

# A rank keeps a matrix that it holds most of until its work would pass SLACK ×
# max(ideal, largest matrix); up to LIMIT × that, where another rank would end later.
HOME_SLACK = Fraction(105, 100)
HOME_LIMIT = Fraction(110, 100)
LINK_GBYTES = 40.0  # where none is stated
# What counts of a rank while homes are improved: its work and its links, or its links
# alone.
_WEIGHTS = ((1, 2), (0, 2))
_MOVES = 20_000  # at most, that are tried for a choice


@dataclass(frozen=True, slots=True)
class Work:
    """A matrix: flops of its Newton-Schulz, its elements, and elements held by rank.

    Replicas are held too, so ``held`` may have more than ``numel`` elements in all.
    ``shared`` are elements that take its home's link as long as all that the homes of
    one matrix do for it together, and ``waits`` picoseconds beside them
    (``sharing.strip_time``); ``beside`` are flops that take as long as both. Only
    strips have them. ``parameter`` is the index of its parameter.
    """

    flops: int
    numel: int
    held: Mapping[int, int]
    shared: int = 0
    waits: int = 0
    parameter: int = 0
    beside: int = 0

    @property
    def is_strip(self) -> bool:
        return self.waits > 0

    @property
    def load(self) -> int:
        """What homes balance, in flops."""
        return self.flops + self.beside

    def time(self, price: Price) -> int:
        """Its time at its home, without slices and results."""
        shared = self.shared * price.element + self.waits * price.picosecond
        return self.flops * price.flop + shared

    def time_as_home(self, home: int, price: Price) -> int:
        """``time``, and that of the home's link: slices it lacks, results of all
        others.
        """
        elements = self.numel + sum(self.held.values()) - 2 * self.held.get(home, 0)
        return self.time(price) + elements * price.element


@dataclass(frozen=True, slots=True)
class Price:
    """Time of one floating-point operation, of one element on a rank's link and of a
    picosecond.

    All are in one unit.
    """

    flop: int
    element: int
    picosecond: int


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of ranks, and of links inside a node and between nodes."""

    price: Price  # of work, and of elements between nodes
    neighbours: int = NODE  # see RankGrid
    faster: int = 1  # see strip_time.faster_near

    def are_near(self, one: int, other: int) -> bool:
        """Whether two ranks are of one node."""
        return one // self.neighbours == other // self.neighbours

    def link_time(self, elements: int, *, near: bool) -> int:
        """The time of elements on a link inside a node or between nodes."""
        return elements * self.price.element // (self.faster if near else 1)


@dataclass(frozen=True, slots=True)
class Loads:
    """What each rank has to do already: flops, and time in the unit of ``Price``."""

    flops: tuple[int, ...]
    times: tuple[int, ...]

    @staticmethod
    def none(size: int) -> Loads:
        """The loads of ``size`` ranks that have nothing to do yet."""
        return Loads((0,) * size, (0,) * size)


def prices(numerics: Numerics) -> Price:
    """Prices from ``rank_tflops`` and ``link_gbytes``, in a unit in which nothing is
    rounded.
    """
    config, itemsize = numerics.config, numerics.itemsize
    flops, per_flops = config.rank_tflops.as_integer_ratio()  # per picosecond
    link = LINK_GBYTES if config.link_gbytes is None else config.link_gbytes
    bytes_, per_bytes = link.as_integer_ratio()  # per nanosecond
    flop, element = per_flops * bytes_, 1000 * itemsize * per_bytes * flops
    picosecond = bytes_ * flops
    common = math.gcd(flop, element, picosecond)
    return Price(flop // common, element // common, picosecond // common)


def choose_homes(
    matrices: Sequence[Work],
    size: int,
    policy: HomePolicy,
    price: Price,
    chosen: Mapping[int, int] | None = None,
    before: Loads | None = None,
    neighbours: int = NODE,
) -> list[int]:
    """The home of each matrix; matrices with most work are assigned first.

    Args:
        matrices: all matrices of an optimizer of the stage.
        size: number of ranks in the stage.
        policy: ``local`` keeps the rank that holds most; others do so until that rank's
            work would pass ``HOME_SLACK`` × max(ideal, largest matrix), then takes the
            rank with the least work, a neighbour's first, or one that holds some, ends
            sooner and stays within ``HOME_LIMIT``. Ties go to the rank with the least
            time (under TP all holders tie), then the lowest.
        price: the prices of work and of bytes.
        chosen: homes that are chosen already, by matrix.
        before: what ranks have to do for other optimizers of the stage.
        neighbours: see ``RankGrid``.
    """
    chosen = {} if chosen is None else chosen
    before = Loads.none(size) if before is None else before
    ranks = _Ranks(matrices, before, price, neighbours)
    for index, home in chosen.items():
        ranks.give(index, home)
    homes = dict(chosen)
    left = [index for index in range(len(matrices)) if index not in chosen]
    left.sort(key=lambda index: (-matrices[index].load, index))
    joint = any(before.flops)
    for _, alike in itertools.groupby(
        left, lambda index: matrices[index].load if joint else index
    ):
        leaving = []
        for index in alike:
            home = ranks.holder(index)
            if policy != "local" and not ranks.has_room(index, home):
                leaving.append(index)
                continue
            homes[index] = home
            ranks.give(index, home)
        for index in leaving:
            homes[index] = ranks.elsewhere(index)
            ranks.give(index, homes[index])
    return [homes[index] for index in range(len(matrices))]


class _Ranks:
    """What ranks have to do, while homes are chosen one by one."""

    def __init__(
        self, matrices: Sequence[Work], before: Loads, price: Price, neighbours: int
    ) -> None:
        self._matrices, self._price, self._neighbours = matrices, price, neighbours
        self._works = list(before.flops)
        self._times = list(before.times)
        # some outdated
        self._by_work = [(work, rank) for rank, work in enumerate(self._works)]
        heapq.heapify(self._by_work)
        self._slack = _of_ideal(HOME_SLACK, matrices, before)
        self._limit = _of_ideal(HOME_LIMIT, matrices, before)

    def holder(self, index: int) -> int:
        """The rank that holds most of a matrix; of several, the one with the least
        time.
        """
        held = self._matrices[index].held
        most = max(held.values())
        return min(
            (self._times[r], r) for r, elements in held.items() if elements == most
        )[1]

    def has_room(self, index: int, rank: int) -> bool:
        """The rank would stay within ``HOME_SLACK``."""
        return self._works[rank] + self._matrices[index].load <= self._slack

    def elsewhere(self, index: int) -> int:
        """The home of a matrix that its holder has no room for."""
        load, held = self._matrices[index].load, self._matrices[index].held
        first = self.holder(index) // self._neighbours * self._neighbours
        neighbours = range(first, min(first + self._neighbours, len(self._works)))
        idle = min(neighbours, key=lambda rank: (self._works[rank], rank))
        if not self.has_room(index, idle):
            idle = self._least()
        near = [rank for rank in held if self._works[rank] + load <= self._limit]
        return min(  # by the time at which it would end, without terms that all have
            (self._times[rank] - 2 * held.get(rank, 0) * self._price.element, rank)
            for rank in (*near, idle)
        )[1]

    def give(self, index: int, home: int) -> None:
        """Count a matrix at its home."""
        self._works[home] += self._matrices[index].load
        self._times[home] += self._matrices[index].time_as_home(home, self._price)
        heapq.heappush(self._by_work, (self._works[home], home))

    def _least(self) -> int:
        """The rank with the least work."""
        while self._by_work[0][0] != self._works[self._by_work[0][1]]:
            heapq.heappop(self._by_work)
        return self._by_work[0][1]


def _of_ideal(factor: Fraction, matrices: Sequence[Work], before: Loads) -> int:
    """``factor`` × max(ideal, largest matrix), rounded down: the same limit for whole
    flops.
    """
    loads = [matrix.load for matrix in matrices]
    size = len(before.flops)
    return (
        factor
        * max(sum(loads) + sum(before.flops), size * max(loads, default=0))
        // size
    )


def improved_by_time(
    works: Sequence[Work], homes: Sequence[int], before: Loads, speeds: Speeds
) -> list[list[int]]:
    """Homes that are improved one by one, by work and links and by links alone.

    The rank that ends last gives a matrix away, or takes one that it holds some of, as
    long as all ranks that the move concerns end before it did. Strips keep their homes.

    Args:
        works, homes: of each matrix and strip.
        before: see ``choose_homes``.
        speeds: of the ranks and their links.
    """
    return [
        _Search(works, homes, before, speeds, weights).improved()
        for weights in _WEIGHTS
    ]


class _Search:
    """Homes that are improved one by one: of each rank its work, and what its links
    carry.
    """

    def __init__(
        self,
        works: Sequence[Work],
        homes: Sequence[int],
        before: Loads,
        speeds: Speeds,
        weights: tuple[int, int],
    ) -> None:
        self._works, self._homes = works, list(homes)
        self._speeds, self._weights = speeds, weights
        self._work = list(before.times)
        self._links = [[0, 0, 0, 0] for _ in self._work]  # out and in, far and near
        self._at: list[set[int]] = [set() for _ in self._work]  # matrices by home
        self._held: list[set[int]] = [set() for _ in self._work]  # and by holder
        self._alike = [(work.flops, tuple(work.held.items())) for work in works]
        for index, (home, work) in enumerate(zip(homes, works, strict=True)):
            self._put(index, home, 1)
            if not work.is_strip:
                self._at[home].add(index)
                for rank in work.held:
                    self._held[rank].add(index)

    def improved(self) -> list[int]:
        """The homes after all moves that help the rank that ends last."""
        ends = [(-self._end(rank), rank) for rank in range(len(self._work))]
        heapq.heapify(ends)
        left = _MOVES
        while left > 0:
            end, last = -ends[0][0], ends[0][1]
            if end != self._end(last):  # outdated
                heapq.heapreplace(ends, (-self._end(last), last))
                continue
            moves = [
                (self._tried(index, home), index, home)
                for index, home in self._moves(last)
            ]
            left -= len(moves)
            if not moves or min(moves)[0] >= end:
                break
            for rank in self._move(*min(moves)[1:]):
                heapq.heappush(ends, (-self._end(rank), rank))
        return self._homes

    def _moves(self, last: int) -> Iterator[tuple[int, int]]:
        """Matrices with a new home each: away from a rank, or to it; of several alike
        one.
        """
        least = min(range(len(self._work)), key=self._end)
        seen = set()
        for index in sorted(self._at[last]):
            if (kind := (last, self._alike[index])) not in seen:
                seen.add(kind)
                for home in sorted({least, *self._works[index].held} - {last}):
                    yield index, home
        for index in sorted(self._held[last] - self._at[last]):
            if (kind := (self._homes[index], self._alike[index])) not in seen:
                seen.add(kind)
                yield index, last

    def _end(self, rank: int) -> int:
        of_work, of_links = self._weights
        return of_work * self._work[rank] + of_links * max(self._links[rank])

    def _tried(self, index: int, home: int) -> int:
        """The last end of the ranks that a move concerns."""
        own = self._homes[index]
        last = max(map(self._end, self._move(index, home)))
        self._move(index, own)
        return last

    def _move(self, index: int, home: int) -> set[int]:
        own = self._homes[index]
        self._put(index, own, -1)
        self._put(index, home, 1)
        self._at[own].discard(index)
        self._at[home].add(index)
        self._homes[index] = home
        return {own, home, *self._works[index].held}

    def _put(self, index: int, home: int, sign: int) -> None:
        work, speeds = self._works[index], self._speeds
        self._work[home] += sign * work.time(speeds.price)
        for rank, elements in work.held.items():
            if rank != home:
                near = speeds.are_near(rank, home)
                time = sign * speeds.link_time(elements, near=near)
                self._links[rank][2 * near] += time
                self._links[home][2 * near + 1] += time
