"""How many ranks of a stage in a row are of one node, and what follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_muon.orthogonalize.iteration import makes_rows
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.describe import node_lines
from megatron_muon.planning.grid import neighbours_of
from megatron_muon.settings.config import MuonConfig
from support.virtual_gpu.plans import small_plan


@pytest.mark.parametrize(
    ("nodes", "neighbours"),
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


def test_a_run_is_told_of_shares_that_may_leave_a_node() -> None:
    """By its launcher, or by the order of its ranks; a node of all neighbours says nothing."""
    config = MuonConfig(split_matrices=4)
    plan = small_plan(config, tp=2, dp=4)
    assert node_lines([plan], config, ranks_here=8) == []
    assert node_lines([plan], config, ranks_here=4) == []  # which have all homes of a matrix
    (machine,) = node_lines([plan], config, ranks_here=2)
    assert "a machine has 2 ranks" in machine and "set it to 2" in machine
    apart = replace(plan, grid=replace(plan.grid, neighbours=2))
    assert node_lines([apart], config, ranks_here=8) == []  # whole squares travel but once a sum
    rows = replace(apart, shared=tuple(replace(one, gathers=(2, 2)) for one in apart.shared))
    (order,) = node_lines([rows], config, ranks_here=8)
    assert "only 2 of a stage's ranks" in order and "set it to 2" in order
    whole = small_plan(MuonConfig(), tp=2, dp=4)
    assert node_lines([whole], MuonConfig(), ranks_here=4) == []


@pytest.mark.parametrize("device", ["cuda", "cuda_symmetric"])
def test_more_homes_than_a_node_has_make_no_rows(device: Device) -> None:
    for node_ranks, by_rows in ((8, True), (4, False)):
        config = MuonConfig(preset="fast", node_ranks=node_ranks)
        assert makes_rows(8192, 8192, 8, Numerics(config, device)) == by_rows
        assert makes_rows(8192, 8192, 4, Numerics(config, device))
