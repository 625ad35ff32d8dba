"""Homes: which rank orthogonalizes which matrix. Plain integers, the same on every rank.

A home costs its rank time: for Newton-Schulz at the rank's speed, and on its link for the pieces
that it lacks and for the directions that it sends back. (What others send is not counted.) Both
speeds are settings, never measured here, and times are exact integers, so every rank and every
restart finds the same homes.

Only work decides whether a matrix leaves the rank that holds most of it: it does where that rank
would pass ``HOME_SLACK``. If bytes counted too, ranks that receive pieces would give away matrices
that they hold whole, and more bytes would move. Time decides where it goes: to the rank with the
least work, or to one that holds some of it, if that ends sooner and stays within ``HOME_LIMIT``.
So whatever the speeds, no rank has more work than ``HOME_LIMIT`` × max(mean, largest matrix), or
4/3 of the busiest rank's in the optimal assignment, whichever is more (``test_homes.py``).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_muon.config import HomePolicy, MuonConfig

# A rank keeps a matrix that it holds most of until its work would pass SLACK × max(ideal, largest
# matrix); up to LIMIT × that, where another rank would end later.
HOME_SLACK = Fraction(105, 100)
HOME_LIMIT = Fraction(110, 100)


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
) -> list[int]:
    """The home of each matrix; matrices with most work are assigned first.

    Args:
        matrices: all matrices of the stage.
        size: number of ranks in the stage.
        policy: ``local`` keeps the rank that holds most; ``balanced`` does so until that rank's
            work would pass ``HOME_SLACK`` × max(ideal, largest matrix), then takes the rank with
            the least work, or one that holds some, ends sooner and stays within ``HOME_LIMIT``.
            Ties go to the rank with the least time (under TP all holders tie), then the lowest.
        price: the prices of work and of bytes.
        chosen: homes that are chosen already, by matrix.
    """
    chosen = {} if chosen is None else chosen
    works, times = [0] * size, [0] * size
    homes = [chosen.get(index, 0) for index in range(len(matrices))]
    for index, home in chosen.items():
        works[home] += matrices[index].flops
        times[home] += _time(matrices[index], home, price)
    by_work = [(works[rank], rank) for rank in range(size)]  # outdated entries are skipped
    heapq.heapify(by_work)
    slack, limit = (_of_ideal(factor, matrices, size) for factor in (HOME_SLACK, HOME_LIMIT))
    for index in sorted(range(len(matrices)), key=lambda i: (-matrices[i].flops, i)):
        if index in chosen:
            continue
        flops, held = matrices[index].flops, matrices[index].held
        most = max(held.values())
        home = min((times[r], r) for r, elements in held.items() if elements == most)[1]
        if policy == "balanced" and works[home] + flops > slack:
            while by_work[0][0] != works[by_work[0][1]]:
                heapq.heappop(by_work)
            near = [rank for rank in held if works[rank] + flops <= limit]
            home = min(  # by the time at which it would end, without terms that all have
                (times[rank] - 2 * held.get(rank, 0) * price.element, rank)
                for rank in (*near, by_work[0][1])
            )[1]
        homes[index] = home
        works[home] += flops
        times[home] += _time(matrices[index], home, price)
        heapq.heappush(by_work, (works[home], home))
    return homes


def busiest_time(works: Sequence[Work], homes: Sequence[int], price: Price) -> int:
    """The time of the rank that has most, in the unit of ``price``."""
    times: dict[int, int] = defaultdict(int)
    for work, home in zip(works, homes, strict=True):
        times[home] += _time(work, home, price)
    return max(times.values(), default=0)


def _time(matrix: Work, home: int, price: Price) -> int:
    return matrix.flops * price.flop + matrix.moved(home) * price.element


def _of_ideal(factor: Fraction, matrices: Sequence[Work], size: int) -> int:
    """``factor`` × max(ideal, largest matrix), rounded down: the same limit for whole flops."""
    flops = [matrix.flops for matrix in matrices]
    return factor * max(sum(flops), size * max(flops, default=0)) // size
