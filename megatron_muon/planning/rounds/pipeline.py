"""The time of a stage's rounds by two speeds: which of several ways to cut them is
shortest.

The order is that of a step: slices of round k + 1 travel while round k is
orthogonalized, and its directions while round k + 1 is. Plain integers, in the unit of
``homes.Price``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Messages = Mapping[tuple[int, int], int]  # time on a link, by (sender, receiver)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a parameter, or a round, asks of ranks and links."""

    work: Mapping[int, int]  # time of Newton-Schulz by home
    # time of its slices on a link, by holder and home; directions take the other way
    slices: Messages


def pipeline_time(
    rounds: Sequence[Sequence[int]], demands: Sequence[Demand], size: int
) -> int:
    """The time until the last rank has its directions, from the parameters of each
    round.
    """
    every = [_together([demands[index] for index in round]) for round in rounds]
    # times at which a rank's link and its work are free
    link, done = ([0] * size, [0] * size)
    arrived = _travelled(every[0].slices, link, done) if every else {}
    for number, demand in enumerate(every):
        for rank, time in arrived.items():
            done[rank] = max(done[rank], time)
        if number + 1 < len(every):
            arrived = _travelled(every[number + 1].slices, link, done)
        for rank, time in demand.work.items():
            done[rank] += time
        back = {(home, holder): time for (holder, home), time in demand.slices.items()}
        _travelled(back, link, done)
    return max(map(max, link, done), default=0)


def _together(demands: Sequence[Demand]) -> Demand:
    work: dict[int, int] = {}
    slices: dict[tuple[int, int], int] = {}
    for demand in demands:
        for rank, time in demand.work.items():
            work[rank] = work.get(rank, 0) + time
        for pair, time in demand.slices.items():
            slices[pair] = slices.get(pair, 0) + time
    return Demand(work, slices)


def _travelled(
    messages: Messages, link: list[int], ready: Sequence[int]
) -> dict[int, int]:
    """Move messages at once; returns when each rank has its own, and links are busy
    until then.
    """
    begin: dict[int, int] = {}
    out: dict[int, int] = {}
    into: dict[int, int] = {}
    for (sender, receiver), time in messages.items():
        start = max(link[sender], link[receiver], ready[sender])
        for rank in (sender, receiver):
            begin[rank] = max(begin.get(rank, 0), start)
        out[sender] = out.get(sender, 0) + time
        into[receiver] = into.get(receiver, 0) + time
    ends = {
        rank: at + max(out.get(rank, 0), into.get(rank, 0))
        for rank, at in begin.items()
    }
    for rank, end in ends.items():
        link[rank] = end
    return {rank: ends[rank] for rank in into}
