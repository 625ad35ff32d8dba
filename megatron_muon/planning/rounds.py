"""Rounds: which parameters go through the exchange together, so that memory stays bounded.

While one round is orthogonalized the next one's pieces and the last one's directions travel. All
matrices of a parameter are in one round. Plain integers, the same on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

Loads = Mapping[int, int]  # bytes by rank of the stage

# How many of the largest parameter a round has room for. With two Llama-3-8B at TP1 x DP8 is priced
# 13 % slower, since ranks wait for each other between rounds; with more it is hardly faster.
_LARGEST_IN_A_ROUND = 3
LEAST_LIMIT = 256 << 20  # bytes; smaller rounds of a GPU take longer to start than to run
# Elements that one elementwise call may take; its fp32 scratch memory is then 80 MiB. One launch of
# torch's operations on lists takes 320 blocks of 2^16 elements, so a larger call saves no launch.
ELEMENTS_AT_ONCE = 320 << 16
LEAST_SCRATCH = 1 << 28  # elements; smaller batches of a GPU leave most of it idle


class Sized(Protocol):
    """A matrix."""

    @property
    def numel(self) -> int: ...


def scratch_limit(matrices: Sequence[Sized]) -> int:
    """Elements of scratch memory that Newton-Schulz may take beside its matrices, on any rank.

    1.5 × the largest matrix, for its next iterate and the squares of its short side, and room for
    batches of small ones.
    """
    largest = max((matrix.numel for matrix in matrices), default=0)
    return max(3 * largest // 2, LEAST_SCRATCH)


def make_rounds(
    homed: Sequence[Loads], taken: Sequence[Loads], limit: int | None
) -> tuple[tuple[int, ...], ...]:
    """Indices of parameters, round by round; each is in exactly one.

    Parameters are taken in the order in which ranks that work through their own would get to them.
    Each goes into the first round in which no rank that has buffers for it would pass the limit. So
    ranks with nothing to share never wait for each other.

    Args:
        homed: for each parameter, bytes of its matrices by the rank that orthogonalizes them.
        taken: for each parameter, bytes of all buffers that a rank has for it.
        limit: bytes taken on any rank; a parameter that alone has more on a rank shares the
            round with none there. None: three times the largest parameter's, or ``LEAST_LIMIT``.

    Raises:
        ValueError: ``limit`` is not above 0.
    """
    if limit is None:
        largest = max((count for loads in taken for count in loads.values()), default=0)
        limit = max(_LARGEST_IN_A_ROUND * largest, LEAST_LIMIT)
    if limit <= 0:
        raise ValueError(f"a round must be allowed more than {limit} bytes")
    rounds: list[list[int]] = []
    loads_of: list[dict[int, int]] = []
    for index in _in_turn(homed):
        number = _first_with_room(loads_of, taken[index], limit)
        if number == len(rounds):
            rounds.append([])
            loads_of.append({})
        rounds[number].append(index)
        for rank, count in taken[index].items():
            loads_of[number][rank] = loads_of[number].get(rank, 0) + count
    return tuple(tuple(sorted(indices)) for indices in rounds)


def _first_with_room(loads_of: Sequence[Loads], more: Loads, limit: int) -> int:
    """The number of the first round that has room for a parameter; a new one's where none has."""
    for number, loads in enumerate(loads_of):
        if all(rank not in loads or loads[rank] + count <= limit for rank, count in more.items()):
            return number
    return len(loads_of)


def _in_turn(homed: Sequence[Loads]) -> list[int]:
    """Indices, sorted by the bytes that their homes have before them; ties by index."""
    before: dict[int, int] = defaultdict(int)
    turn = []
    for index, loads in enumerate(homed):
        turn.append((max((before[rank] for rank in loads), default=0), index))
        for rank, count in loads.items():
            before[rank] += count
    return [index for _, index in sorted(turn)]
