"""How many ranks of a stage in a row are of one node."""

from __future__ import annotations

import pytest

from megatron_muon.planning.grid import neighbours_of


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
