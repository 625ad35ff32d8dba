"""The time of a stage's step, in integers; a plan's strips are chosen by it.

It runs the events of ``schedule`` on all ranks. A rank makes its products one after
another, and its link carries the messages of one round at a time. A rank waits for all
that it sends and receives, so for its peers to begin, and for its part of their links.
Elementwise work, AdamW's part and the host take no time here: they hardly depend on
what is chosen.

Times are in flops (``sharing.speeds``). ``pricing.step`` runs every operation;
``test_shared_models`` holds the choices to its times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_muon.planning.homes import Work
from megatron_muon.planning.schedule import round_numbers, step_events
from megatron_muon.planning.sharing.speeds import (
    BATCH,
    MESSAGE,
    NETWORK_BYTE,
    NODE_BYTE,
    PEER,
)

_Pairs = Mapping[tuple[int, int], int]  # elements by (holder, home)


@dataclass(frozen=True, slots=True)
class Links:
    """A stage's ranks and the elements that travel between them."""

    size: int  # number of ranks
    neighbours: int  # see RankGrid
    itemsize: int  # bytes of an element


@dataclass(frozen=True, slots=True)
class Round:
    """What a round asks of ranks and links."""

    work: Mapping[int, int]  # time of its matrices by home
    slices: _Pairs
    links: Mapping[int, int]  # time of each rank's messages, one way


def clocked(
    works: Sequence[Work],
    homes: Sequence[int],
    rounds: Sequence[Sequence[int]],
    links: Links,
) -> list[Round]:
    """What each round asks of ranks and links.

    Args:
        works, homes: of each matrix and strip.
        rounds: indices of parameters per round.
        links: of the stage.
    """
    round_of = round_numbers(rounds)
    slices: list[dict[tuple[int, int], int]] = [defaultdict(int) for _ in rounds]
    at_home: list[dict[int, int]] = [defaultdict(int) for _ in rounds]
    batches: set[tuple[int, int, int, int]] = set()
    for work, home in zip(works, homes, strict=True):
        number = round_of[work.parameter]
        at_home[number][home] += work.load
        batches.add((number, home, work.flops, work.numel))
        for rank, elements in work.held.items():
            if rank != home:
                slices[number][rank, home] += elements
    for number, home, _, _ in batches:
        at_home[number][home] += BATCH
    return [
        Round(work, pairs, _link_times(pairs, links))
        for work, pairs in zip(at_home, slices, strict=True)
    ]


def step_times(
    optimizers: Sequence[Sequence[Round]], size: int
) -> tuple[list[int], list[int]]:
    """When each rank has made its last products, and when it has its last results.

    Args:
        optimizers: the rounds of each, in the order of their steps.
        size: number of ranks.
    """
    link = [0] * size  # times at which each rank's link is free
    done = [0] * size
    worked = [0] * size
    arrivals: dict[tuple[int, int], Mapping[int, int]] = {}
    for action, optimizer, number, travels in step_events(list(map(len, optimizers))):
        if action == "adamw" or travels is False:
            continue  # takes no time
        round = optimizers[optimizer][number]
        if action == "orthogonalize":
            for rank, time in round.work.items():
                done[rank] += time
            worked = list(done)
        elif action in ("start", "scatter"):
            arrivals[optimizer, number] = _exchanged(round, link, done)
        else:
            for rank, time in arrivals[optimizer, number].items():
                done[rank] = max(done[rank], time)
    return worked, done


def _exchanged(round: Round, link: list[int], done: Sequence[int]) -> Mapping[int, int]:
    """When each rank has its messages of a round, and its link is free again."""
    ready = {rank: max(link[rank], done[rank]) for rank in round.links}
    begins = dict(ready)
    # where all are ready at one time, none waits
    waits = len(set(ready.values())) > 1
    for one, other in round.slices if waits else ():
        first, second = ready[one], ready[other]
        if begins[one] < second:
            begins[one] = second
        elif begins[other] < first:
            begins[other] = first
    ends = {rank: begins[rank] + time for rank, time in round.links.items()}
    for rank, end in ends.items():
        link[rank] = end
    return ends


def _link_times(pairs: _Pairs, links: Links) -> Mapping[int, int]:
    """The time of each rank's messages: results take the same way back.

    A peer's link takes the messages of several ranks at once, so a small one is through
    before others.
    """
    total = [0] * (4 * links.size)  # time, by way: out or in, far or near
    count = [0] * (4 * links.size)
    messages = []
    for (holder, home), elements in pairs.items():
        byte, out, into = NETWORK_BYTE, 4 * holder, 4 * home + 1
        if holder // links.neighbours == home // links.neighbours:
            byte, out, into = NODE_BYTE, out + 2, into + 2
        time = elements * links.itemsize * byte
        messages.append((out, into, time))
        total[out] += time
        total[into] += time
        count[out] += 1
        count[into] += 1
    takes = list(total)
    for out, into, time in messages:
        if takes[out] < total[into]:
            takes[out] = max(takes[out], min(time * count[into], total[into]))
        if takes[into] < total[out]:
            takes[into] = max(takes[into], min(time * count[out], total[out]))
    times = {}
    for rank in range(links.size):
        first = 4 * rank
        peers = sum(count[first : first + 4])
        if peers:
            times[rank] = max(takes[first : first + 4]) + MESSAGE + PEER * peers
    return times
