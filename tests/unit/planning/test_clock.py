"""The clock of a plan, by hand; what the stage chooses by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning import clock
from megatron_muon.planning.clock import Links, Round, clocked, step_times
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.homes import Work
from megatron_muon.planning.sharing.speeds import MESSAGE, PEER
from megatron_muon.planning.stage import Choice, Stage, with_later
from megatron_muon.settings.config import MuonConfig

NODE = 7  # speed of a link inside a node over one between nodes, here
LINKS = Links(size=16, neighbours=8, itemsize=1)
# Flops and elements between nodes take 1, on links of one kind.
EVEN = Links(size=2, neighbours=1, itemsize=1)


@pytest.fixture
def speeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes take 70 between nodes, or what the test says; messages and batches take
    nothing more.
    """
    byte = getattr(request, "param", 70)
    for name, value in {
        "NETWORK_BYTE": byte,
        "NODE_BYTE": byte // NODE,
        "MESSAGE": 0,
        "PEER": 0,
        "BATCH": 0,
    }.items():
        monkeypatch.setattr(clock, name, value)


def in_one_round(
    works: Sequence[Work], homes: Sequence[int], *before: Sequence[Round]
) -> int:
    own = clocked(works, homes, [(0,)], LINKS)
    return max(step_times([*before, own], 16)[1])


@pytest.mark.usefixtures("speeds")
@pytest.mark.parametrize("holder, byte", [(0, 0), (1, 10), (8, 70)])
def test_slices_travel_there_and_back(holder: int, byte: int) -> None:
    """From the home itself, from a neighbour of its node, and from another node."""
    work = Work(flops=8000, numel=70, held={holder: 70})
    assert in_one_round([work], [0]) == 8000 + 2 * 70 * byte


def test_a_message_takes_its_latency_and_that_of_each_peer() -> None:
    with mock.patch.multiple(clock, NETWORK_BYTE=0, NODE_BYTE=0):
        (round,) = clocked([Work(0, 3, {1: 1, 2: 2})], [0], [(0,)], LINKS)
    assert round.links[0] == MESSAGE + 2 * PEER
    assert round.links[1] == round.links[2] == MESSAGE + PEER


@pytest.mark.usefixtures("speeds")
def test_a_rank_waits_for_its_peers() -> None:
    """Rank 8 has no work but a slice of the matrix of rank 0, whose link takes
    another's, too. If it begins late, so does the home.
    """
    works = [Work(8000, 100, {8: 50, 9: 50}), Work(80, 1, {1: 1})]
    assert in_one_round(works, [0, 1]) == 8000 + 2 * 100 * 70
    small = [Work(8000, 100, {8: 1, 9: 99}), Work(4800, 1, {8: 1})]
    assert in_one_round(small, [0, 8]) == 8000 + 2 * 100 * 70
    before = [Round({8: 30_000}, {}, {})]
    assert in_one_round(small, [0, 8], before) == 30_000 + 8000 + 2 * 100 * 70


@pytest.mark.usefixtures("speeds")
@pytest.mark.parametrize("speeds", [1], indirect=True)
def test_rounds_overlap() -> None:
    """Rank 1 sends all to rank 0. At once: 6 for slices, 8 of work, 6 for directions.
    In two: 2 for the small one's; the large one's come at 6, when 3 of work are done at
    5; 5 more, and 4 back.
    """
    works = [Work(3, 2, {1: 2}, parameter=0), Work(5, 4, {1: 4}, parameter=1)]
    for rounds, time in (([(0, 1)], 20), ([(0,), (1,)], 15)):
        own = clocked(works, [0, 0], rounds, EVEN)
        assert max(step_times([own], 2)[1]) == time
    # the second optimizer's slices come while the first one orthogonalizes: as in two
    # rounds, but its first ones leave only after the directions of the other
    two = [clocked([replace(each, parameter=0)], [0], [(0,)], EVEN) for each in works]
    assert max(step_times(two, 2)[1]) == 2 + 3 + 2 + 4 + 5 + 4
    assert step_times([[], []], 2) == ([0, 0], [0, 0])


@pytest.mark.parametrize(
    "later, flops",
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
    assert with_later(here, here, here, later) == flops


def test_what_ranks_do_for_earlier_optimizers_counts_for_later_homes() -> None:
    stage = Stage(RankGrid((((0, 1),),)), Numerics(MuonConfig()))
    assert stage.before == [0, 0]
    work = Work(7, 4, {0: 3, 1: 1})
    earlier = [Choice([work], [0], ((0,),))]
    after = Stage(stage.grid, stage.numerics, earlier)
    assert after.before == [7, 0]
