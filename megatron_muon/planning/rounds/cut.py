"""Rounds: parameters that go through the exchange together, so that memory stays
bounded.

While one round is orthogonalized, the slices of the next one and the directions of the
one before travel. All matrices of a parameter are in one round. Plain integers, the
same on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Protocol

Loads = Mapping[int, int]  # bytes by rank of the stage

# A round has room for this many parameters of the largest size. With 2 the time model
# has Llama-3-8B at TP1 x DP8 13 % slower, since ranks wait for each other between
# rounds; with more than 3 it is hardly faster.
_LARGEST_IN_A_ROUND = 3
# picoseconds that one more round takes to start: messages, kernels, Python
ROUND_PS = 200_000_000
# bytes; on a GPU, smaller rounds take longer to start than to run
LEAST_LIMIT = 256 << 20
# Elements that one elementwise call may take; its fp32 scratch memory is then 80 MiB.
# One launch of torch's operations on lists takes 320 blocks of 2^16 elements, so a
# larger call saves no launch.
ELEMENTS_AT_ONCE = 320 << 16
LEAST_SCRATCH = 1 << 28  # elements; smaller batches leave most of a GPU idle


class Sized(Protocol):
    """A matrix."""

    @property
    def numel(self) -> int: ...


def scratch_limit(matrices: Sequence[Sized]) -> int:
    """Elements of scratch memory for a batch of Newton-Schulz, the same on all ranks.

    It is 1.5 × the largest matrix, and at least ``LEAST_SCRATCH``, so that small
    matrices go in batches. A matrix that needs more is not batched, and takes what it
    needs.
    """
    largest = max((matrix.numel for matrix in matrices), default=0)
    return max(3 * largest // 2, LEAST_SCRATCH)


def make_rounds(
    homed: Sequence[Loads], taken: Sequence[Loads], limit: int | None
) -> tuple[tuple[int, ...], ...]:
    """Indices of parameters per round; each parameter is in exactly one.

    Parameters come in the order in which ranks would reach them if each worked through
    its own. Each goes into the first round where no rank that has buffers for it would
    pass the limit. So a parameter in a later round fits into none before it, and ranks
    that share nothing never wait for each other.

    Args:
        homed: for each parameter, bytes of its matrices by the rank that orthogonalizes
            them.
        taken: for each parameter, bytes of all its buffers by rank.
        limit: cap on the bytes taken on any rank. A parameter that takes more on a rank
            shares its round with no other there. None: three times the largest
            parameter's bytes, at least ``LEAST_LIMIT``.

    Raises:
        ValueError: ``limit`` is not above 0.
    """
    limit = _limit_of(taken, limit)
    rounds: list[list[int]] = []
    loads_of: list[dict[int, int]] = []
    for index in _in_turn(homed):
        number = _first_with_room(loads_of, taken[index], limit)
        _put(rounds, loads_of, number, index, taken[index])
    return tuple(tuple(sorted(indices)) for indices in rounds)


def smaller_first(
    homed: Sequence[Loads], taken: Sequence[Loads], limit: int | None, least: int
) -> tuple[tuple[int, ...], ...]:
    """Rounds of which each has an equal share of every home's bytes, small matrices
    first.

    So large matrices travel while small ones are at work, and no home waits for
    another's share. A parameter comes later than its share where the limit leaves no
    room.

    Args:
        homed, taken, limit: see ``make_rounds``.
        least: number of rounds; more where the limit asks for them.
    """
    limit = _limit_of(taken, limit)
    of_home: dict[int, int] = defaultdict(int)
    for loads in homed:
        for rank, count in loads.items():
            of_home[rank] += count
    before: dict[int, int] = defaultdict(int)
    shares = []
    for index in sorted(
        range(len(homed)), key=lambda at: (max(homed[at].values(), default=0), at)
    ):
        own = homed[index].items()
        middles = [
            Fraction(2 * before[rank] + count, 2 * of_home[rank]) for rank, count in own
        ]
        shares.append((max(middles, default=Fraction(0)), index))
        for rank, count in own:
            before[rank] += count
    rounds: list[list[int]] = [[] for _ in range(least)]
    loads_of: list[dict[int, int]] = [{} for _ in range(least)]
    for share, index in sorted(shares):
        first = min(int(share * least), least - 1)
        number = first + _first_with_room(loads_of[first:], taken[index], limit)
        _put(rounds, loads_of, number, index, taken[index])
    return tuple(tuple(sorted(indices)) for indices in rounds if indices)


def _limit_of(taken: Sequence[Loads], limit: int | None) -> int:
    if limit is None:
        largest = max(
            (max(loads.values(), default=0) for loads in taken),
            default=0,
        )
        return max(_LARGEST_IN_A_ROUND * largest, LEAST_LIMIT)
    if limit <= 0:
        raise ValueError(f"a round must be allowed more than {limit} bytes")
    return limit


def _put(
    rounds: list[list[int]],
    loads_of: list[dict[int, int]],
    number: int,
    index: int,
    more: Loads,
) -> None:
    if number == len(rounds):
        rounds.append([])
        loads_of.append({})
    rounds[number].append(index)
    for rank, count in more.items():
        loads_of[number][rank] = loads_of[number].get(rank, 0) + count


def _first_with_room(loads_of: Sequence[Loads], more: Loads, limit: int) -> int:
    """The number of the first round with room for a parameter; where none has, of a new
    one.
    """
    for number, loads in enumerate(loads_of):
        if all(
            rank not in loads or loads[rank] + count <= limit
            for rank, count in more.items()
        ):
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
