"""Homes: which rank orthogonalizes which matrix. Plain integers, the same on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_muon.config import HomePolicy

# A rank keeps the matrices it holds until its work would pass this multiple of the ideal.
HOME_SLACK = 1.05


def choose_homes(
    flops: Sequence[int], held: Sequence[dict[int, int]], size: int, policy: HomePolicy
) -> list[int]:
    """The home of each matrix, the largest matrices first.

    Args:
        flops: work of each matrix.
        held: for each matrix, elements held by rank.
        size: number of ranks.
        policy: ``local`` keeps the rank that holds most; ``balanced`` does so until that rank's
            work would pass ``HOME_SLACK`` × max(ideal, largest matrix), then takes the least
            loaded. Ties go to the least loaded rank (under TP all holders tie), then the lowest.
    """
    loads = [0] * size
    by_load = [(0, rank) for rank in range(size)]  # a heap; entries of an old load are passed over
    homes = [0] * len(flops)
    limit = HOME_SLACK * max(sum(flops) / size, max(flops, default=0))
    for index in sorted(range(len(flops)), key=lambda i: (-flops[i], i)):
        most = max(held[index].values())
        holders = [rank for rank, elements in held[index].items() if elements == most]
        home = min(holders, key=lambda rank: (loads[rank], rank))
        if policy == "balanced" and loads[home] + flops[index] > limit:
            while by_load[0][0] != loads[by_load[0][1]]:
                heapq.heappop(by_load)
            home = by_load[0][1]
        homes[index] = home
        loads[home] += flops[index]
        heapq.heappush(by_load, (loads[home], home))
    return homes
