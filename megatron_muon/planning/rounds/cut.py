"""Rounds: parameters that go through the exchange together, so that memory stays
bounded.

While one round is orthogonalized, the slices of the next one and the results of the
one before travel. All matrices of a parameter are in one round. Plain integers, the
same on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.homes import Work
from megatron_muon.planning.layout import Matrix

Rounds = tuple[tuple[int, ...], ...]  # indices of parameters per round
BytesByRank = Mapping[int, int]  # bytes by rank of the stage

# A round has room for this many parameters of the largest size. With 2 the time model
# has Llama-3-8B at TP1 x DP8 13 % slower, since ranks wait for each other between
# rounds; with more than 3 it is hardly faster.
_LARGEST_IN_A_ROUND = 3
# Bytes at a home from which on its matrices come in two rounds: they travel for longer
# than one more round takes to start.
LEAST_IN_TWO = 32 << 20
# bytes; on a GPU, smaller rounds take longer to start than to run
LEAST_LIMIT = 256 << 20
# Elements that one elementwise call may take; its fp32 scratch memory is then 80 MiB.
# One launch of torch's operations on lists takes 320 blocks of 2^16 elements, so a
# larger call saves no launch.
ELEMENTS_AT_ONCE = 320 << 16
LEAST_SCRATCH = 1 << 28  # elements; smaller batches leave most of a GPU idle


def scratch_limit(matrices: Sequence[Matrix]) -> int:
    """Elements of scratch memory for a batch of Newton-Schulz, the same on all ranks.

    It is 1.5 × the largest matrix, and at least ``LEAST_SCRATCH``, so that small
    matrices go in batches. A matrix that needs more is not batched, and takes what it
    needs.
    """
    largest = max((matrix.numel for matrix in matrices), default=0)
    return max(3 * largest // 2, LEAST_SCRATCH)


def rounds_of(
    works: Sequence[Work], homes: Sequence[int], numerics: Numerics
) -> Rounds:
    """Rounds that keep to ``round_bytes``, where two rounds use memory at a time.

    There are as few as fit; where they are free to choose, and a home has
    ``LEAST_IN_TWO``, two at least, of which small matrices come first. The homes of a
    shared matrix wait for each other, so with strips all matrices come as early as they
    can.

    If all rounds are alike, a home has at most three copies of a matrix: the one that
    is orthogonalized, the message that it comes in and the one that it goes in. Another
    rank has two copies of a slice. So in each of two rounds a matrix counts 3/2 at its
    home, a slice 1.

    Where every matrix lies whole on one rank, as with an expert DP of 1, most stay
    there. If nothing travels in a round or its neighbours, a home has one copy: a
    matrix counts 1/2. Those rounds come first, so a rank that has more to do for
    another optimizer, and gives matrices away for that, is as far as the others when
    these travel. The last of them shares memory with slices that arrive, which take 2/3
    of what a round may: if anything travels, a matrix that stays counts 3/4.

    Args:
        works, homes: of each matrix and strip; every parameter has one.
        numerics: ``round_bytes`` is read.
    """
    itemsize, limit = numerics.itemsize, numerics.config.round_bytes
    count = max((work.parameter + 1 for work in works), default=0)
    every = list(zip(works, homes, strict=True))
    travels = {work.parameter for work, home in every if set(work.held) != {home}}
    if any(len(work.held) > 1 for work in works):
        travels = set(range(count))
    homed = [Counter[int]() for _ in range(count)]
    taken = [Counter[int]() for _ in range(count)]
    for work, home in every:
        index, nbytes = work.parameter, work.numel * itemsize
        homed[index][home] += nbytes
        for rank, elements in work.held.items():
            if rank != home:
                taken[index][rank] += elements * itemsize
        quarters = 3 if travels else 2
        if index in travels:
            quarters = 6
        taken[index][home] += -(-quarters * nbytes // 4)

    def cut(some: Sequence[int], least: int = 1) -> Rounds:
        loads = [homed[index] for index in some], [taken[index] for index in some]
        made = make_rounds(*loads, limit)
        if least > 1:
            made = smaller_first(*loads, limit, max(least, len(made)))
        return tuple(tuple(some[at] for at in round) for round in made)

    stays = cut([index for index in range(count) if index not in travels])
    at_home = Counter[int]()
    for index in travels:
        at_home.update(homed[index])
    is_free = limit is None and not any(work.beside for work in works)
    is_free &= max(at_home.values(), default=0) >= LEAST_IN_TWO
    return stays + cut(sorted(travels), least=2 if is_free else 1)


def make_rounds(
    homed: Sequence[BytesByRank], taken: Sequence[BytesByRank], limit: int | None
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
    """
    limit = _limit_of(taken, limit)
    rounds: list[list[int]] = []
    taken_by: list[Counter[int]] = []
    for index in _by_bytes_before(homed):
        number = _first_with_room(taken_by, taken[index], limit)
        _put(rounds, taken_by, number, index, taken[index])
    return tuple(tuple(sorted(indices)) for indices in rounds)


def smaller_first(
    homed: Sequence[BytesByRank],
    taken: Sequence[BytesByRank],
    limit: int | None,
    least: int,
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
    of_home = Counter[int]()
    for loads in homed:
        of_home.update(loads)
    before = Counter[int]()
    shares = []
    for index in sorted(
        range(len(homed)), key=lambda at: (max(homed[at].values(), default=0), at)
    ):
        middles = [
            Fraction(2 * before[rank] + count, 2 * of_home[rank])
            for rank, count in homed[index].items()
        ]
        shares.append((max(middles, default=Fraction(0)), index))
        before.update(homed[index])
    rounds: list[list[int]] = [[] for _ in range(least)]
    taken_by = [Counter[int]() for _ in range(least)]
    for share, index in sorted(shares):
        first = min(int(share * least), least - 1)
        number = first + _first_with_room(taken_by[first:], taken[index], limit)
        _put(rounds, taken_by, number, index, taken[index])
    return tuple(tuple(sorted(indices)) for indices in rounds if indices)


def _limit_of(taken: Sequence[BytesByRank], limit: int | None) -> int:
    if limit is not None:
        return limit
    most = (max(loads.values(), default=0) for loads in taken)
    return max(_LARGEST_IN_A_ROUND * max(most, default=0), LEAST_LIMIT)


def _put(
    rounds: list[list[int]],
    taken_by: list[Counter[int]],
    number: int,
    index: int,
    more: BytesByRank,
) -> None:
    if number == len(rounds):
        rounds.append([])
        taken_by.append(Counter())
    rounds[number].append(index)
    taken_by[number].update(more)


def _first_with_room(
    taken_by: Sequence[BytesByRank], more: BytesByRank, limit: int
) -> int:
    """The number of the first round with room for a parameter; where none has, of a new
    one.
    """
    for number, loads in enumerate(taken_by):
        if all(
            rank not in loads or loads[rank] + count <= limit
            for rank, count in more.items()
        ):
            return number
    return len(taken_by)


def _by_bytes_before(homed: Sequence[BytesByRank]) -> list[int]:
    """Indices, sorted by the bytes that their homes have before them; ties by index."""
    before = Counter[int]()
    order = []
    for index, added in enumerate(homed):
        order.append((max((before[rank] for rank in added), default=0), index))
        before.update(added)
    return [index for _, index in sorted(order)]
