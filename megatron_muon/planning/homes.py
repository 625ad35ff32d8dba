"""Homes: which rank orthogonalizes which matrix. Plain integers, the same on every rank.

A home costs its rank time: for Newton-Schulz at the rank's speed, and on its link for the pieces
that it lacks and for the directions that it sends back. (What others send is not counted.) Both
speeds are settings, never measured here, and times are exact integers, so every rank and every
restart finds the same homes.

Only work decides whether a matrix leaves the rank that holds most of it: it does where that rank
would pass ``HOME_SLACK``. If bytes counted too, ranks that receive pieces would give away matrices
that they hold whole, and more bytes would move. Time decides where it goes: to the rank with the
least work, or to one that holds some of it, if that ends sooner and stays within ``HOME_LIMIT``.
That is the rank with the least work of the neighbours of the one that holds most, a node's GPUs,
unless it would pass ``HOME_SLACK``, too.
So whatever the speeds, no rank has more work than ``HOME_LIMIT`` × max(mean, largest matrix), or
4/3 of the busiest rank's in the optimal assignment, whichever is more (``test_homes.py``).

A stage's optimizers have homes on the same ranks. The dense one chooses first, that of the experts
sees what every rank has by then (``Loads``), and the mean is one of both. So a rank with a large
dense matrix gives experts away, and a rank with few dense ones takes them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_muon.config import HomePolicy, MuonConfig

# A rank keeps a matrix that it holds most of until its work would pass SLACK × max(ideal, largest
# matrix); up to LIMIT × that, where another rank would end later.
HOME_SLACK = Fraction(105, 100)
HOME_LIMIT = Fraction(110, 100)
_NEIGHBOURS = 8  # ranks of a stage that are most likely GPUs of one node


@dataclass(frozen=True, slots=True)
class Work:
    """A matrix: flops of its Newton-Schulz, its elements, and elements held by rank.

    Replicas are held too, so ``held`` may have more than ``numel`` elements in all. ``squares`` are
    elements that the home of a strip sends to the matrix's other homes, and as many come.
    """

    flops: int
    numel: int
    held: Mapping[int, int]
    squares: int = 0

    def moved(self, home: int) -> int:
        """Elements that a home receives and sends: pieces it lacks, directions of all others."""
        pieces = self.numel + sum(self.held.values()) - 2 * self.held.get(home, 0)
        return pieces + self.squares


@dataclass(frozen=True, slots=True)
class Price:
    """Time of one floating-point operation and of one element on a rank's link, in one unit."""

    flop: int
    element: int


@dataclass(frozen=True, slots=True)
class Loads:
    """What each rank has to do already: flops, and time in the unit of ``Price``."""

    flops: tuple[int, ...]
    times: tuple[int, ...]

    @staticmethod
    def none(size: int) -> Loads:
        """Those of ``size`` ranks that have nothing to do yet."""
        return Loads((0,) * size, (0,) * size)


def prices(config: MuonConfig, itemsize: int) -> Price:
    """Prices from the two speeds, in a unit in which nothing is rounded.

    Args:
        config: ``rank_tflops`` and ``link_gbytes``.
        itemsize: bytes of an element that travels.
    """
    flops, per_flops = config.rank_tflops.as_integer_ratio()  # per picosecond
    bytes_, per_bytes = config.link_gbytes.as_integer_ratio()  # per nanosecond
    flop, element = per_flops * bytes_, 1000 * itemsize * per_bytes * flops
    common = math.gcd(flop, element)
    return Price(flop // common, element // common)


def choose_homes(
    matrices: Sequence[Work],
    size: int,
    policy: HomePolicy,
    price: Price,
    chosen: Mapping[int, int] | None = None,
    before: Loads | None = None,
) -> list[int]:
    """The home of each matrix; matrices with most work are assigned first.

    Args:
        matrices: all matrices of an optimizer of the stage.
        size: number of ranks in the stage.
        policy: ``local`` keeps the rank that holds most; ``balanced`` does so until that rank's
            work would pass ``HOME_SLACK`` × max(ideal, largest matrix), then takes the rank with
            the least work, a neighbour's first, or one that holds some, ends sooner and stays
            within ``HOME_LIMIT``.
            Ties go to the rank with the least time (under TP all holders tie), then the lowest.
        price: the prices of work and of bytes.
        chosen: homes that are chosen already, by matrix.
        before: what ranks have to do for other optimizers of the stage; None: nothing.
    """
    chosen = {} if chosen is None else chosen
    before = Loads.none(size) if before is None else before
    works, times = list(before.flops), list(before.times)
    homes = [chosen.get(index, 0) for index in range(len(matrices))]
    for index, home in chosen.items():
        works[home] += matrices[index].flops
        times[home] += _time(matrices[index], home, price)
    by_work = [(works[rank], rank) for rank in range(size)]  # outdated entries are skipped
    heapq.heapify(by_work)
    slack, limit = (_of_ideal(factor, matrices, before) for factor in (HOME_SLACK, HOME_LIMIT))
    for index in sorted(range(len(matrices)), key=lambda i: (-matrices[i].flops, i)):
        if index in chosen:
            continue
        flops, held = matrices[index].flops, matrices[index].held
        most = max(held.values())
        home = min((times[r], r) for r, elements in held.items() if elements == most)[1]
        if policy == "balanced" and works[home] + flops > slack:
            while by_work[0][0] != works[by_work[0][1]]:
                heapq.heappop(by_work)
            first = home // _NEIGHBOURS * _NEIGHBOURS
            idle = min((works[r], r) for r in range(first, min(first + _NEIGHBOURS, size)))
            if idle[0] + flops > slack:
                idle = by_work[0]
            near = [rank for rank in held if works[rank] + flops <= limit]
            home = min(  # by the time at which it would end, without terms that all have
                (times[rank] - 2 * held.get(rank, 0) * price.element, rank)
                for rank in (*near, idle[1])
            )[1]
        homes[index] = home
        works[home] += flops
        times[home] += _time(matrices[index], home, price)
        heapq.heappush(by_work, (works[home], home))
    return homes


def busiest_time(works: Sequence[Work], homes: Sequence[int], price: Price, before: Loads) -> int:
    """The time of the rank that has most, in the unit of ``price``; see ``choose_homes``."""
    times = list(before.times)
    for work, home in zip(works, homes, strict=True):
        times[home] += _time(work, home, price)
    return max(times)


def _time(matrix: Work, home: int, price: Price) -> int:
    return matrix.flops * price.flop + matrix.moved(home) * price.element


def _of_ideal(factor: Fraction, matrices: Sequence[Work], before: Loads) -> int:
    """``factor`` × max(ideal, largest matrix), rounded down: the same limit for whole flops."""
    flops, size = [matrix.flops for matrix in matrices], len(before.flops)
    return factor * max(sum(flops) + sum(before.flops), size * max(flops, default=0)) // size
