"""Homes: which rank orthogonalizes which matrix, as plain integers.

``balanced`` keeps a matrix on the rank that holds most of it, where it sends the fewest
bytes, unless that rank would pass ``HOME_SLACK`` × max(mean, largest matrix). Then the
least loaded of the holder's neighbours (a node's GPUs) takes it, or of all ranks if
that one would pass the same. ``local`` always keeps it.

A stage's optimizers have homes on the same ranks. The dense one chooses first, that of
the experts sees what every rank has by then, and the mean is one of both. So a rank
with a large dense matrix gives experts away, and a rank with few dense ones takes them.
Experts are many alike: every rank keeps its own of one size before any gets those of
others, so that fewer move.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_muon.settings.config import HomePolicy
from megatron_muon.settings.run import NODE

HOME_SLACK = Fraction(105, 100)


@dataclass(frozen=True, slots=True)
class Work:
    """A matrix: flops of its Newton-Schulz, its elements, and elements held by rank.

    Replicas are held too, so ``held`` may have more than ``numel`` elements in all.
    ``beside`` are flops that take as long as all that the homes of one matrix do for it
    beside products (``sharing.strip_time``); only strips have them. ``parameter`` is
    the index of its parameter.
    """

    flops: int
    numel: int
    held: Mapping[int, int]
    beside: int = 0
    parameter: int = 0

    @property
    def load(self) -> int:
        """Its time at its home, without slices and results, in flops."""
        return self.flops + self.beside


def choose_homes(
    matrices: Sequence[Work],
    size: int,
    policy: HomePolicy,
    chosen: Mapping[int, int] | None = None,
    before: Sequence[int] | None = None,
    neighbours: int = NODE,
) -> list[int]:
    """The home of each matrix; matrices with most work are assigned first.

    Args:
        matrices: all matrices of an optimizer of the stage.
        size: number of ranks in the stage.
        policy: see the module. Under TP, and where a matrix has several shards, holders
            tie: the one that receives least takes it, then the one with least work.
        chosen: homes that are chosen already, by matrix.
        before: what each rank has to do for other optimizers of the stage, in flops.
        neighbours: see ``RankGrid``.
    """
    chosen = {} if chosen is None else chosen
    before = [0] * size if before is None else before
    ranks = _Ranks(matrices, before, neighbours)
    for index, home in chosen.items():
        ranks.give(index, home)
    homes = dict(chosen)
    left = [index for index in range(len(matrices)) if index not in chosen]
    left.sort(key=lambda index: (-matrices[index].load, index))
    joint = any(before)
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
        self, matrices: Sequence[Work], before: Sequence[int], neighbours: int
    ) -> None:
        self._matrices, self._neighbours = matrices, neighbours
        self._works = list(before)
        self._received = [0] * len(before)  # elements that come to each
        # some outdated
        self._by_work = [(work, rank) for rank, work in enumerate(before)]
        heapq.heapify(self._by_work)
        loads = [matrix.load for matrix in matrices]
        size = len(before)
        most = max(sum(loads) + sum(before), size * max(loads, default=0))
        self._slack = HOME_SLACK * most // size

    def holder(self, index: int) -> int:
        """The rank that holds most of a matrix; of several, the one that receives
        least.
        """
        held = self._matrices[index].held
        most = max(held.values())
        holders = [rank for rank, elements in held.items() if elements == most]
        return min(holders, key=lambda r: (self._received[r], self._works[r], r))

    def has_room(self, index: int, rank: int) -> bool:
        """The rank would stay within ``HOME_SLACK``."""
        return self._works[rank] + self._matrices[index].load <= self._slack

    def elsewhere(self, index: int) -> int:
        """The home of a matrix that its holder has no room for."""
        first = self.holder(index) // self._neighbours * self._neighbours
        neighbours = range(first, min(first + self._neighbours, len(self._works)))
        idle = min(neighbours, key=lambda rank: (self._works[rank], rank))
        return idle if self.has_room(index, idle) else self._least()

    def give(self, index: int, home: int) -> None:
        """Count a matrix at its home."""
        matrix = self._matrices[index]
        self._works[home] += matrix.load
        self._received[home] += matrix.numel - matrix.held.get(home, 0)
        heapq.heappush(self._by_work, (self._works[home], home))

    def _least(self) -> int:
        """The rank with the least work."""
        while self._by_work[0][0] != self._works[self._by_work[0][1]]:
            heapq.heappop(self._by_work)
        return self._by_work[0][1]
