"""Bytes of optimizer state on disk, Muon's against AdamW's: the same model in each format.

`bash tests/run.sh -s tests/ranks/checkpoints/test_checkpoint_sizes.py` prints the table.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_muon.lab.inspect.report import examine
from support.checkpoints.inspecting import save_and_hold
from support.checkpoints.saving import formats
from support.models.gpt import Case, Topology, muon_weights
from support.ranks import run
from support.runs.whole import whole

CASE = Case(steps=1)
TOPOLOGY = Topology(dp=2)
STATE = ("main parameters", "momentum", "AdamW's moments")


def sizes(optimizer: str, format: str, folder: Path) -> tuple[dict[str, int], int, float]:
    """Bytes by kind, elements of the model, and the part of them that is Muon's if there is one."""
    case = replace(CASE, optimizer=optimizer)
    args = (case, TOPOLOGY, format, str(folder), None)
    truth = whole(run(save_and_hold, TOPOLOGY.world_size, *args))
    numel = {name: tensor.numel() for name, tensor in truth["params"].items()}
    of_muon = sum(numel[name] for name in muon_weights(CASE)) / sum(numel.values())
    report = examine(folder)
    assert not report.faults, report.faults
    return report.bytes, sum(numel.values()), of_muon


@pytest.mark.parametrize("format", formats())
def test_muons_state_has_no_second_moment_on_disk(format: str, tmp_path: Path) -> None:
    lines = []
    states = {}
    for optimizer in ("adam", "muon"):
        folder = tmp_path / optimizer
        folder.mkdir()
        by_kind, numel, of_muon = sizes(optimizer, format, folder)
        cells = [f"{by_kind[kind] / numel:.2f}" for kind in STATE]
        states[optimizer] = sum(by_kind[kind] for kind in STATE) / numel
        files = f"{by_kind['total'] / numel:.2f}"
        lines.append(
            f"| {format} | {optimizer} | {' | '.join(cells)} | {states[optimizer]:.2f} | {files} |"
        )
    print("\n" + "\n".join(lines))
    # Adam has 12 bytes an element: main parameter and two moments; Muon one tensor less. What
    # stands between parameters in a buffer is counted, under 64 elements for each of 28 of them.
    padding = 12 * 64 * 28 / numel
    assert states["adam"] == pytest.approx(12.0, abs=padding)
    assert states["muon"] == pytest.approx(12.0 - 4 * of_muon, abs=padding)
    assert 0.8 < of_muon < 0.9  # of this model; of a large one nearly all


@pytest.fixture(scope="module", autouse=True)
def _head() -> None:
    """Bytes for each element of the model; in ``files`` is all, weights and format, too."""
    print("\n| format | optimizer | main | momentum | moments | state | files |")
    print("|---|---|---|---|---|---|---|")
