"""The clock of a plan, by hand and by property; what the stage chooses by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.clock import Round, clocked, step_times
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.homes import Loads, Price, Speeds, Work, choose_homes
from megatron_muon.planning.sharing.strip_time import MESSAGE_PS, NODE_LINK, PEER_PS
from megatron_muon.planning.stage import Choice, Stage, with_later
from megatron_muon.settings.config import MuonConfig

# 8 a flop, 100 an element between nodes; messages and batches take nothing more
SPEEDS = Speeds(Price(flop=8, element=100, picosecond=0), 8, NODE_LINK)
# Elements and flops take 1, on links of one kind.
EVEN = Speeds(Price(1, 1, 0), 1)


def in_one_round(
    works: Sequence[Work], homes: Sequence[int], *before: Sequence[Round]
) -> int:
    own = clocked(works, homes, [(0,)], SPEEDS, 16)
    return max(step_times([*before, own], 16)[1])


@pytest.mark.parametrize(("holder", "link"), [(0, 0), (1, 70 // NODE_LINK), (8, 70)])
def test_slices_travel_there_and_back(holder: int, link: int) -> None:
    """From the home itself, from a neighbour of its node, and from another node."""
    work = Work(flops=1000, numel=70, held={holder: 70})
    assert in_one_round([work], [0]) == 8 * 1000 + 2 * 100 * link


def test_a_message_takes_its_latency_and_that_of_each_peer() -> None:
    speeds = replace(SPEEDS, price=Price(0, 0, 1))
    (round,) = clocked([Work(0, 3, {1: 1, 2: 2})], [0], [(0,)], speeds, 16)
    assert round.links[0] == MESSAGE_PS + 2 * PEER_PS
    assert round.links[1] == round.links[2] == MESSAGE_PS + PEER_PS


def test_a_rank_waits_for_its_peers() -> None:
    """Rank 8 has no work but a slice of the matrix of rank 0, whose link takes
    another's, too. If it begins late, so does the home.
    """
    works = [Work(1000, 100, {8: 50, 9: 50}), Work(10, 1, {1: 1})]
    assert in_one_round(works, [0, 1]) == 8 * 1000 + 2 * 100 * 100
    small = [Work(1000, 100, {8: 1, 9: 99}), Work(600, 1, {8: 1})]
    assert in_one_round(small, [0, 8]) == 8 * 1000 + 2 * 100 * 100
    before = [Round({8: 30_000}, {}, {})]
    assert in_one_round(small, [0, 8], before) == 30_000 + 8 * 1000 + 2 * 100 * 100


def test_rounds_overlap() -> None:
    """Rank 1 sends all to rank 0. At once: 6 for slices, 8 of work, 6 for directions.
    In two: 2 for the small one's; the large one's come at 6, when 3 of work are done at
    5; 5 more, and 4 back.
    """
    works = [Work(3, 2, {1: 2}, parameter=0), Work(5, 4, {1: 4}, parameter=1)]
    for rounds, time in (([(0, 1)], 20), ([(0,), (1,)], 15)):
        own = clocked(works, [0, 0], rounds, EVEN, 2)
        assert max(step_times([own], 2)[1]) == time
    # the second optimizer's slices come while the first one orthogonalizes: as in two
    # rounds, but its first ones leave only after the directions of the other
    two = [
        clocked([replace(each, parameter=0)], [0], [(0,)], EVEN, 2) for each in works
    ]
    assert max(step_times(two, 2)[1]) == 2 + 3 + 2 + 4 + 5 + 4
    assert step_times([[], []], 2) == ([0, 0], [0, 0])


@pytest.mark.parametrize(
    ("later", "flops"),
    [
        # 200 of each rank: none stays where the matrix is
        (3200, 1600 + 2 * 200 + 200),
        # 2,000 of each: that rank keeps 1.05 × the mean, 2,205 in all
        (32_000, 1600 + 2 * 1395 + 2000),
        (320_000, 20_100 + 20_000),  # more at all others than travels
        (0, 1600),
    ],
)
def test_later_work_fills_ranks_that_have_less_and_leaves_others(
    later: int, flops: int
) -> None:
    here = [1600, *[0] * 15]
    ends = [8 * each for each in here]
    assert with_later(ends, ends, here, later, SPEEDS.price) == 8 * flops


@st.composite
def stages(draw: st.DrawFn) -> tuple[Stage, list[Work]]:
    """Matrices and strips with random work, each held by some of a few ranks, with any
    link, after another optimizer or none.
    """
    size = draw(st.integers(1, 5))
    held = st.dictionaries(st.integers(0, size - 1), st.integers(1, 30), min_size=1)

    def some() -> list[Work]:
        works = []
        for parameter in range(draw(st.integers(1, 9))):
            flops, by_rank = draw(st.integers(1, 30)) * 10**6, draw(held)
            waits = draw(st.integers(0, 1))
            numel = sum(by_rank.values())
            works.append(Work(flops, numel, by_rank, 0, waits, parameter))
        return works

    speeds = {
        "rank_tflops": draw(st.integers(1, 100)) / 1e6,
        "link_gbytes": 10 ** draw(st.floats(-9, 0)),
        "round_bytes": draw(st.sampled_from([None, 30, 60])),
    }
    near = draw(st.sampled_from((1, 2, 8)))
    grid = RankGrid(((tuple(range(size)),),), near)
    earlier = []
    if draw(st.booleans()):
        works = some()
        every = tuple(range(len(works)))
        earlier = [Choice(works, [work.numel % size for work in works], (every,))]
    return Stage(grid, Numerics(MuonConfig(**speeds)), earlier), some()  # type: ignore[arg-type]


@given(stages())
def test_homes_by_time_are_no_later_than_both_others_and_leave_strips(
    drawn: tuple[Stage, list[Work]],
) -> None:
    stage, works = drawn
    strips = {index: 0 for index, work in enumerate(works) if work.is_strip}
    size, price = stage.grid.size, stage.speeds.price
    choices = [
        choose_homes(works, size, policy, price, strips, stage.before)
        for policy in ("balanced", "local")
    ]
    found = stage.fastest(works, choices)
    assert found == stage.fastest(works, choices)
    by_work, local = (stage.in_rounds(works, homes).time for homes in choices)
    assert stage.in_rounds(works, found.homes) == found
    a_batch = 200_000_000 * price.picosecond
    assert found.time <= by_work
    assert local >= found.time - max(found.time // 95, a_batch)
    assert all(found.homes[index] == 0 for index in strips)
    assert all(0 <= home < size for home in found.homes)


def test_what_ranks_do_for_earlier_optimizers_counts_for_later_homes() -> None:
    stage = Stage(RankGrid((((0, 1),),)), Numerics(MuonConfig()))
    assert stage.before == Loads.none(2)
    work = Work(7, 4, {0: 3, 1: 1})
    earlier = [Choice([work], [0], ((0,),))]
    after = Stage(stage.grid, stage.numerics, earlier)
    assert after.before.flops == (7, 0)
