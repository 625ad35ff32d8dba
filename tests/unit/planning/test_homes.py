"""Homes: whose a matrix is, and how much a rank may have. Plain integers."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from figures.llama import llama_plan
from megatron_muon.orthogonalize.iteration import makes_rows, ns_flops
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.agreed import device_lines
from megatron_muon.planning.describe import node_lines
from megatron_muon.planning.grid import neighbours_of
from megatron_muon.planning.homes import (
    HOME_SLACK,
    Work,
    choose_homes,
)
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.settings.coefficients import NsDtype
from megatron_muon.settings.config import HomePolicy, MuonConfig
from support.virtual_gpu.plans import small_plan


@st.composite
def stages(draw: st.DrawFn) -> tuple[list[Work], int]:
    """Matrices with random work, each held by some of a few ranks."""
    size = draw(st.integers(1, 3))
    held = st.dictionaries(st.integers(0, size - 1), st.integers(1, 30), min_size=1)
    found = [
        (draw(st.integers(1, 30)), draw(held)) for _ in range(draw(st.integers(1, 7)))
    ]
    return [
        Work(flops, sum(by_rank.values()), by_rank) for flops, by_rank in found
    ], size


def _busiest(
    matrices: list[Work], homes: tuple[int, ...] | list[int], size: int
) -> int:
    work = [0] * size
    for matrix, home in zip(matrices, homes, strict=True):
        work[home] += matrix.flops
    return max(work)


@given(stages())
def test_the_busiest_rank_is_near_the_best(stage: tuple[list[Work], int]) -> None:
    """Within 4/3 of the best of all homes, or ``HOME_SLACK`` × max(mean, largest)."""
    matrices, size = stage
    found = _busiest(matrices, choose_homes(matrices, size, "balanced"), size)
    every = itertools.product(range(size), repeat=len(matrices))
    best = min(_busiest(matrices, homes, size) for homes in every)
    flops = [matrix.flops for matrix in matrices]
    ideal = max(Fraction(sum(flops), size), max(flops))
    assert found <= max(Fraction(4, 3) * best, HOME_SLACK * ideal)


def _llama(dp_size: int, **settings: Any) -> ExchangePlan:
    return llama_plan(dp_size, MuonConfig(homes="balanced", **settings))[0]


def _over_ideal(plan: ExchangePlan) -> Fraction:
    flops = plan.ns_flops()
    return max(flops) / max(Fraction(sum(flops), plan.size), max(plan.flops))


# Of 64 ranks in fp16, 32 have a matrix of 5.77 Tflop, 32 one of 3.85, and there are 64
# of 2.06. So the busiest has 7.83, where the ideal is 6.94; a rank with 3.85 and two of
# 2.06 would have 7.97.
_OF_64 = Fraction(113, 100)


@pytest.mark.parametrize(
    "dp_size, dtype, most",
    [
        (8, None, HOME_SLACK),
        (64, None, _OF_64),
        (64, "bf16", HOME_SLACK),
        (512, None, HOME_SLACK),
    ],
)
def test_llama_8bs_busiest_rank_is_within_the_slack(
    dp_size: int, dtype: NsDtype | None, most: Fraction
) -> None:
    plan = _llama(dp_size, ns_dtype=dtype, split_matrices="off")
    assert _over_ideal(plan) <= most


def test_local_homes_send_less_and_balanced_ones_even_out_the_work() -> None:
    local, balanced = (
        llama_plan(8, MuonConfig(homes=homes, ns_dtype="bf16"))[0]
        for homes in get_args(HomePolicy)[::-1]
    )
    assert sum(local.sent_bytes()) <= 0.85 * sum(balanced.sent_bytes())
    assert _over_ideal(balanced) <= HOME_SLACK < _over_ideal(local)


@pytest.mark.parametrize("neighbours, home", [(2, 5), (4, 7)])
def test_a_matrix_goes_to_the_idlest_rank_of_its_holders_node(
    neighbours: int, home: int
) -> None:
    """Rank 4 is full. Rank 5 takes it where two share a node, where four do rank 7,
    which has less work; rank 0, with least of all, is of another node.
    """
    flops = 40, 100, 100, 100, 100, 60, 90, 50
    works = [Work(each, 20, {rank: 20}) for rank, each in enumerate(flops)]
    matrices = [*works, Work(20, 20, {4: 20})]
    found = choose_homes(matrices, 8, "balanced", neighbours=neighbours)
    assert found == [*range(8), home]


def test_a_plan_describes_the_device_where_it_depends_on_it() -> None:
    """Standard's work is another with each kernel of symmetric products only; with the
    preset fast CPUs, which all take standard, agree with each other and with no GPU.
    """
    for iteration, kinds in (("standard", 3), ("gram", 5), ("auto", 5), (None, 4)):
        config = MuonConfig(preset="fast", ns_iteration=iteration)  # type: ignore[arg-type]
        every = [Numerics(config, device) for device in get_args(Device)]
        assert len({tuple(device_lines(one)) for one in every}) == kinds, iteration
        flops = {
            ns_flops(4096, 14336, one) + ns_flops(1024, 1024, one) for one in every
        }
        assert len(flops) <= kinds, iteration
    # which no library makes
    in_fp32 = MuonConfig(ns_iteration="standard", ns_dtype="fp32")
    every = [Numerics(in_fp32, device) for device in get_args(Device)]
    assert len({tuple(device_lines(one)) for one in every}) == 1


@pytest.mark.parametrize(
    "nodes, neighbours",
    [
        ([0] * 16, 8),  # NVLink over many machines
        ([0] * 8 + [1] * 8, 8),
        ([0, 0, 0, 0, 1, 1, 1, 1], 4),
        ([0, 0, 1, 1, 2, 2], 2),
        ([0, 0, 0, 1, 1, 1], 1),  # teams of two would straddle
        ([0, 1, 2, 3], 1),
        ([0, 0, 0], 8),  # of one team, which is not full
    ],
)
def test_teams_of_neighbours_are_of_one_node(nodes: list[int], neighbours: int) -> None:
    assert neighbours_of(nodes) == neighbours


def test_a_run_warns_of_sharing_that_may_cross_nodes() -> None:
    config = MuonConfig(split_matrices=4)
    plan = small_plan(config, tp=2, dp=4)
    assert node_lines([plan], config, ranks_here=8) == []
    # which have all homes of a matrix
    assert node_lines([plan], config, ranks_here=4) == []
    (machine,) = node_lines([plan], config, ranks_here=2)
    assert "a machine has 2 ranks" in machine and "set it to 2" in machine
    whole = small_plan(MuonConfig(), tp=2, dp=4)
    assert node_lines([whole], MuonConfig(), ranks_here=4) == []


@pytest.mark.parametrize("device", ["cuda", "cuda_symmetric"])
def test_more_homes_than_ranks_of_a_node_compute_no_rows(device: Device) -> None:
    for node_ranks, by_rows in ((8, True), (4, False)):
        config = MuonConfig(preset="fast", node_ranks=node_ranks)
        assert makes_rows(8192, 8192, 8, Numerics(config, device)) == by_rows
        assert makes_rows(8192, 8192, 4, Numerics(config, device))
