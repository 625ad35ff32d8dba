"""The time of a stage's step by the homes of its matrices, to choose how many strips
they get.

Pieces travel to their homes, these orthogonalize, directions travel back: all in one
round, as it is where ranks are many enough to share. A rank waits for all that it sends
and receives, and so for its peers' links, and on the way back for their work. Plain
integers, in the unit of ``homes.Price``. ``pricing.step`` runs every operation of the
same; ``test_shared_models`` holds the choice to its times.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction

from megatron_muon.planning.homes import HOME_SLACK, Loads, Price, Work
from megatron_muon.planning.sharing.strip_time import NODE_LINK
from megatron_muon.settings.run import NODE

# Speed of large products over ``rank_tflops``, whose default is 40 % of a data sheet's.
# The time model of an H100 has 65 to 71 % for matrices that can gain by being shared.
# At 40 % a plan shares what does not pay: work seems longer than it is beside messages.
_LARGE_PRODUCTS = Fraction(13, 8)
# A matrix that leaves its rank for another's travels there and back, between nodes in
# 1.6 to 2.4 times its own Newton-Schulz by the same model, of 2,048 x 7,168 without and
# with a kernel.
_LEAVES = 2
_Pairs = Mapping[tuple[int, int], int]  # elements by (home, rank that holds them)


def stage_time(
    works: Sequence[Work],
    homes: Sequence[int],
    price: Price,
    before: Loads,
    later: int = 0,
    neighbours: int = NODE,
    faster: int = NODE_LINK,
) -> int:
    """The time until the last rank has its directions, in the unit of ``price``.

    Args:
        works, homes: matrices and strips, and the home of each.
        price: the prices of work and of bytes.
        before: what ranks have to do for other optimizers of the stage before.
        later: flops of those that step after it. They have homes by what ranks have to
            do by then, so they fill those that have less than the mean of all, and
            leave those that would pass ``HOME_SLACK`` × the mean. Their messages count
            as long as a rank's mean of their work.
        neighbours: see ``RankGrid``.
        faster: see ``strip_time.faster_near``.
    """
    times = list(before.times)
    flops = list(before.flops)
    for work, home in zip(works, homes, strict=True):
        flops[home] += work.flops
        times[home] += _at_large(work.flops * price.flop)
        times[home] += work.shared * price.element + work.waits * price.picosecond
    near, far = _slices(works, homes, neighbours)
    links = [
        max(inside // faster, between) * price.element
        for inside, between in zip(
            _links(near, len(times)), _links(far, len(times)), strict=True
        )
    ]
    begins = [time + link for time, link in zip(times, links, strict=True)]
    met = list(begins)
    for home, rank in itertools.chain(near, far):
        if begins[home] > met[rank]:
            met[rank] = begins[home]
        elif begins[rank] > met[home]:
            met[home] = begins[rank]
    ends = [at + link for at, link in zip(met, links, strict=True)]
    if not later:
        return max(ends)
    mean = (sum(flops) + later) // len(flops)
    each = later // len(flops)
    room = mean * HOME_SLACK.numerator // HOME_SLACK.denominator - each
    for rank, own in enumerate(flops):
        leaves = min(each, max(0, own - room))
        ends[rank] += _LEAVES * _at_large(leaves * price.flop)
        begins[rank] += _at_large(max(0, mean - own) * price.flop)
    return max(*ends, *begins) + _at_large(each * price.flop)


def _at_large(time: int) -> int:
    return time * _LARGE_PRODUCTS.denominator // _LARGE_PRODUCTS.numerator


def _slices(
    works: Sequence[Work], homes: Sequence[int], neighbours: int
) -> tuple[_Pairs, _Pairs]:
    """What neighbours hold for each other's matrices, and what other ranks do."""
    near: dict[tuple[int, int], int] = {}
    far: dict[tuple[int, int], int] = {}
    for work, home in zip(works, homes, strict=True):
        first = home // neighbours * neighbours
        for rank, elements in work.held.items():
            pairs = near if first <= rank < first + neighbours else far
            pair = home, rank
            if pair in pairs:
                pairs[pair] += elements
            elif rank != home:
                pairs[pair] = elements
    return near, far


def _links(pairs: _Pairs, size: int) -> list[int]:
    """Elements that each rank waits for, one way: its own, and its part of what peers
    send.

    A peer's link takes messages of several ranks in turns: a small one is through
    before others.
    """
    home_elements, home_peers = [0] * size, [0] * size
    held_elements, held_peers = [0] * size, [0] * size
    for (home, rank), elements in pairs.items():
        home_elements[home] += elements
        home_peers[home] += 1
        held_elements[rank] += elements
        held_peers[rank] += 1
    most = list(map(max, home_elements, held_elements))
    for (home, rank), elements in pairs.items():
        if most[rank] < home_elements[home]:
            most[rank] = max(
                most[rank], min(home_elements[home], elements * home_peers[home])
            )
        if most[home] < held_elements[rank]:
            most[home] = max(
                most[home], min(held_elements[rank], elements * held_peers[rank])
            )
    return most
