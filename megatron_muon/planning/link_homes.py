"""Homes by two stated speeds: those whose step takes least time, of a few ways to
choose them.

``homes`` lets work alone decide what leaves its holder, as on links that are fast
beside it. Where ``link_gbytes`` is stated, homes by work and the largest holders are
both improved: the rank that ends last gives a matrix away or takes one that it holds
some of, as long as all ranks that the move concerns end before it did. The rounds of
each choice are then run in time. The first choice, by work, stays unless another gains
``_LEAST_GAIN``. Plain integers in the unit of ``homes.Price``, the same on every rank
and restart. Strips keep their homes; ``plan`` tries the strips that are best by work
and those for local homes. ``pricing.step`` runs every operation; ``test_shared_models``
holds the choice to its times.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from megatron_muon.planning.homes import Loads, Price, Work
from megatron_muon.planning.sharing.strip_time import MESSAGE_PS, PEER_PS

# the bound is about as far from the time model's order of choices
_LEAST_GAIN = Fraction(1, 64)
# Of the matrices of one size that a home has in a round: they are a batch, and the last
# wave of its products does not fill a GPU. Less than it is no gain.
_BATCH_PS = 200_000_000
# What counts of a rank while homes are improved: its work and its links, or its links
# alone.
_WEIGHTS = ((1, 2), (0, 2))
_MOVES = 20_000  # at most, that are tried for a choice
_Pairs = Mapping[tuple[int, int], int]  # elements by (sender, receiver)
_Rounds = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Stage:
    """What homes are chosen for."""

    # works, owner: its matrices, and the index of each one's parameter
    works: Sequence[Work]
    owner: Sequence[int]
    fixed: frozenset[int]  # matrices whose homes stay, strips
    before: Loads  # what ranks have to do for other optimizers before
    # by rank, the time at which it has those of other optimizers before
    directions: Sequence[int]
    price: Price  # the prices of work and of bytes
    neighbours: int  # see RankGrid
    faster: int  # see strip_time.faster_near

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.before.times)

    def own_time(self, index: int) -> int:
        """The time of a matrix at its home."""
        work, price = self.works[index], self.price
        shared = work.shared * price.element + work.waits * price.picosecond
        return work.flops * price.flop + shared


def fastest(
    stage: Stage,
    choices: Sequence[Sequence[int]],
    rounds_of: Callable[[Sequence[int]], _Rounds],
) -> tuple[Sequence[int], int]:
    """The homes with which the stage's step takes least time, and that time.

    Args:
        stage: see above.
        choices: homes to begin with; each, and then what is improved, has to gain on
            the best.
        rounds_of: the rounds of homes, as indices of parameters.
    """
    improved = [
        _Search(stage, homes, of).improved() for homes, of in product(choices, _WEIGHTS)
    ]
    tried = list(dict.fromkeys(map(tuple, (*choices, *improved))))
    times = [step_time(stage, homes, rounds_of(homes)) for homes in tried]
    best, a_batch = 0, Fraction(_BATCH_PS * stage.price.picosecond)
    for at, time in enumerate(times):
        if time < times[best] - max(times[best] * _LEAST_GAIN, a_batch):
            best = at
    return tried[best], times[best]


def step_time(stage: Stage, homes: Sequence[int], rounds: _Rounds) -> int:
    """The time until the last rank has its directions; see ``pipeline`` for the
    order.
    """
    round_of: dict[int, int] = {}
    for number, round in enumerate(rounds):
        round_of |= dict.fromkeys(round, number)
    slices: list[dict[tuple[int, int], int]] = [defaultdict(int) for _ in rounds]
    at_home: list[dict[int, int]] = [defaultdict(int) for _ in rounds]
    batches: set[tuple[int, int, int, int]] = set()
    for index, (home, work) in enumerate(zip(homes, stage.works, strict=True)):
        number = round_of[stage.owner[index]]
        at_home[number][home] += stage.own_time(index)
        batches.add((number, home, work.flops, work.numel))
        for rank, elements in work.held.items():
            if rank != home:
                slices[number][rank, home] += elements
    for number, home, _, _ in batches:
        at_home[number][home] += _BATCH_PS * stage.price.picosecond
    link = list(stage.before.times)
    done = list(stage.before.times)
    directions: Mapping[int, int] = dict(enumerate(stage.directions))
    gathered = _exchange(stage, slices[0], link, done) if slices else {}
    for number, there in enumerate(slices):
        _wait(gathered, done)
        if number + 1 < len(slices):
            gathered = _exchange(stage, slices[number + 1], link, done)
        for rank, time in at_home[number].items():
            done[rank] += time
        _wait(directions, done)
        back = {(home, rank): elements for (rank, home), elements in there.items()}
        directions = _exchange(stage, back, link, done)
    _wait(directions, done)
    return max(done)


def _wait(ends: Mapping[int, int], done: list[int]) -> None:
    for rank, end in ends.items():
        done[rank] = max(done[rank], end)


def _exchange(
    stage: Stage, pairs: _Pairs, link: list[int], done: Sequence[int]
) -> Mapping[int, int]:
    """Move messages at once; returns when each rank has its own, and its link is busy
    until then.

    A rank waits for its peers to begin, for its own bytes, and for its part of its
    peers' links.
    """
    neighbours, faster = stage.neighbours, stage.faster
    total: dict[tuple[int, int], int] = defaultdict(int)  # time by (rank, way)
    count: dict[tuple[int, int], int] = defaultdict(int)
    ways = []
    for (sender, receiver), elements in pairs.items():
        is_near = sender // neighbours == receiver // neighbours
        time = elements * stage.price.element // (faster if is_near else 1)
        out, into = (sender, 2 * is_near), (receiver, 2 * is_near + 1)
        ways.append((out, into, time))
        for end in (out, into):
            total[end] += time
            count[end] += 1
    begin: dict[int, int] = defaultdict(int)
    takes: dict[int, int] = defaultdict(int)
    peers: dict[int, int] = defaultdict(int)
    for out, into, time in ways:
        start = max(link[out[0]], done[out[0]], link[into[0]], done[into[0]])
        for own, other in ((out, into), (into, out)):
            rank, at_peer = own[0], min(time * count[other], total[other])
            peers[rank] += 1
            begin[rank] = max(begin[rank], start)
            takes[rank] = max(takes[rank], total[own], at_peer)
    for rank, at in begin.items():
        latency = (MESSAGE_PS + PEER_PS * peers[rank]) * stage.price.picosecond
        link[rank] = at + takes[rank] + latency
    return {rank: link[rank] for rank in begin}


class _Search:
    """Homes that are improved one by one: of each rank its work, and what its links
    carry.
    """

    def __init__(
        self, stage: Stage, homes: Sequence[int], weights: tuple[int, int]
    ) -> None:
        self._stage = stage
        self._homes = list(homes)
        self._weights = weights
        self._near = stage.faster
        self._work = list(stage.before.times)
        self._links = [[0, 0, 0, 0] for _ in self._work]  # out and in, far and near
        self._at: list[set[int]] = [set() for _ in self._work]  # matrices by home
        self._held: list[set[int]] = [set() for _ in self._work]  # and by holder
        self._alike = [(work.flops, tuple(work.held.items())) for work in stage.works]
        for index, home in enumerate(homes):
            self._put(index, home, 1)
            if index not in stage.fixed:
                self._at[home].add(index)
                for rank in stage.works[index].held:
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
                for home in sorted({least, *self._stage.works[index].held} - {last}):
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
        return {own, home, *self._stage.works[index].held}

    def _put(self, index: int, home: int, sign: int) -> None:
        stage, neighbours = self._stage, self._stage.neighbours
        self._work[home] += sign * stage.own_time(index)
        for rank, elements in stage.works[index].held.items():
            if rank != home:
                is_near = rank // neighbours == home // neighbours
                time = sign * (
                    elements * stage.price.element // (self._near if is_near else 1)
                )
                self._links[rank][2 * is_near] += time
                self._links[home][2 * is_near + 1] += time
