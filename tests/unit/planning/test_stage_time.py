"""The time of a stage by which a plan chooses how many homes share a matrix."""

from __future__ import annotations

import pytest

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.homes import Loads, Price, Work
from megatron_muon.planning.layout import Strip
from megatron_muon.planning.sharing.stage_time import stage_time
from megatron_muon.planning.sharing.strip_time import NODE_LINK, strip_time
from megatron_muon.settings.config import MuonConfig

PRICE = Price(flop=13, element=100, picosecond=1)  # 8 a flop of a large matrix
IDLE = Loads.none(16)


@pytest.mark.parametrize(("holder", "link"), [(0, 0), (1, 70 // NODE_LINK), (8, 70)])
def test_pieces_travel_there_and_back(holder: int, link: int) -> None:
    """From the home itself, from a neighbour of its node, and from another node."""
    work = Work(flops=1000, numel=70, held={holder: 70})
    assert stage_time([work], [0], PRICE, IDLE) == 8 * 1000 + 2 * 100 * link


def test_a_rank_waits_for_its_peers() -> None:
    """Rank 8 has no work but a piece of the matrix of rank 0, whose link takes another's, too."""
    works = [Work(1000, 100, {8: 50, 9: 50}), Work(10, 1, {1: 1})]
    assert stage_time(works, [0, 1], PRICE, IDLE) == 8 * 1000 + 2 * 100 * 100
    small = [Work(1000, 100, {8: 1, 9: 99}), Work(600, 1, {8: 1})]
    assert stage_time(small, [0, 8], PRICE, IDLE) == 8 * 1000 + 2 * 100 * 100
    before = Loads((0,) * 16, tuple(30_000 * (rank == 8) for rank in range(16)))
    assert stage_time(small, [0, 8], PRICE, before) == 30_000 + 4800 + 100 * (2 + 100)


@pytest.mark.parametrize(
    ("later", "flops"),
    [
        (3200, 1600 + 2 * 200 + 200),  # 200 of each rank: none stays where the matrix is
        # 2,000 of each: that rank keeps 1.05 × the mean, 2,205 in all
        (32_000, 1600 + 2 * 1395 + 2000),
        (320_000, 20_100 + 20_000),  # more at all others than travels
    ],
)
def test_later_work_fills_ranks_that_have_less_and_leaves_others(later: int, flops: int) -> None:
    work = Work(1600, 1, {0: 1})
    assert stage_time([work], [0], PRICE, IDLE, later) == 8 * flops


def test_homes_on_several_nodes_take_longer() -> None:
    """Their squares travel over slower links; what they wait for messages is the same."""
    strip, own = Strip(3000, 1500, 0, 4), 3000 * 1500 // 4
    near, far = (
        strip_time(strip, own, 64, Numerics(MuonConfig(), "cuda"), neighbours)
        for neighbours in (4, 2)
    )
    assert near.elements < far.elements and near.waits == far.waits
