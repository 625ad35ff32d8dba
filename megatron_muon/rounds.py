"""Rounds: which parameters go through the exchange together, so that memory stays bounded.

While one round is orthogonalized the next one's pieces and the last one's directions travel. All
matrices of a parameter are in one round. Plain integers, the same on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

Loads = Mapping[int, int]  # bytes by rank of the stage


def make_rounds(
    homed: Sequence[Loads], taken: Sequence[Loads], limit: int
) -> tuple[tuple[int, ...], ...]:
    """Indices of parameters, round by round; each is in exactly one.

    Parameters are taken in the order in which every rank, working through its own, would get to
    them, so that in each round all ranks have work. A round is closed where with the next parameter
    a rank would have more than ``limit`` bytes in it.

    Args:
        homed: for each parameter, bytes of its matrices by the rank that orthogonalizes them.
        taken: for each parameter, bytes of all buffers that a rank has for it.
        limit: of bytes taken on any rank; a parameter that alone has more on a rank shares the
            round with none there.

    Raises:
        ValueError: ``limit`` is not above 0.
    """
    if limit <= 0:
        raise ValueError(f"a round must be allowed more than {limit} bytes")
    rounds: list[list[int]] = []
    loads: dict[int, int] = {}
    for index in _in_turn(homed):
        full = any(loads.get(rank, 0) + count > limit for rank, count in taken[index].items())
        if full or not rounds:
            rounds.append([])
            loads = {}
        rounds[-1].append(index)
        for rank, count in taken[index].items():
            loads[rank] = loads.get(rank, 0) + count
    return tuple(tuple(sorted(indices)) for indices in rounds)


def _in_turn(homed: Sequence[Loads]) -> list[int]:
    """By how much its homes have before it; ties by index."""
    before: dict[int, int] = defaultdict(int)
    turn = []
    for index, loads in enumerate(homed):
        turn.append((max((before[rank] for rank in loads), default=0), index))
        for rank, count in loads.items():
            before[rank] += count
    return [index for _, index in sorted(turn)]
