"""Bytes of optimizer state on disk, Muon's against AdamW's: the same model in each
format.

`bash tests/run.sh -s tests/ranks/checkpoints/test_checkpoint_sizes.py` prints the
table.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from support.checkpoints.saving import save_new
from support.marks import in_each_format
from support.models.gpt import Case, muon_weights
from support.ranks import run
from support.runs.topologies import DP2
from support.runs.whole import whole

CASE = Case(steps=1)


def sizes(optimizer: str, format: str, folder: Path) -> tuple[int, int, int, float]:
    """Bytes of state and of files, elements of the model, and the part of them that is
    Muon's.
    """
    case = replace(CASE, optimizer=optimizer)
    args = (case, DP2, format, folder)
    truth = whole(run(save_new, DP2.world_size, *args))
    numel = {name: tensor.numel() for name, tensor in truth["params"].items()}
    of_muon = sum(numel[name] for name in muon_weights(CASE)) / sum(numel.values())
    files = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return _bytes_of_state(folder), files, sum(numel.values()), of_muon


def _bytes_of_state(folder: Path) -> int:
    """Of main parameters, momentum and moments; objects and the format torch by their
    files.
    """
    if not (folder / ".metadata").exists():
        return sum(path.stat().st_size for path in folder.glob("*distrib_optim.pt"))
    metadata = FileSystemReader(folder).read_metadata()
    kept = {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(("optimizer.", "chained_"))
    }
    tensors = (
        entry for entry in kept.values() if isinstance(entry, TensorStorageMetadata)
    )
    objects = {
        at.fqn: info.length
        for at, info in metadata.storage_data.items()
        if ".param_state/" in at.fqn
    }
    return sum(entry.size.numel() * 4 for entry in tensors) + sum(objects.values())


@in_each_format
def test_muons_state_has_no_second_moment_on_disk(format: str, tmp_path: Path) -> None:
    lines = []
    states = {}
    for optimizer in ("adam", "muon"):
        folder = tmp_path / optimizer
        state, files, numel, of_muon = sizes(optimizer, format, folder)
        states[optimizer] = state / numel
        lines.append(
            f"| {format} | {optimizer} | {state / numel:.2f} | {files / numel:.2f} |"
        )
    print("\n" + "\n".join(lines))
    # Adam has 12 bytes an element: main parameter and two moments; Muon one tensor
    # less. What stands between parameters in a buffer is counted, under 64 elements for
    # each of 28 of them.
    padding = 12 * 64 * 28 / numel
    assert states["adam"] == pytest.approx(12.0, abs=padding)
    assert states["muon"] == pytest.approx(12.0 - 4 * of_muon, abs=padding)
    assert 0.8 < of_muon < 0.9  # of this model; of a large one nearly all


@pytest.fixture(scope="module", autouse=True)
def _head() -> None:
    """Bytes for each element of the model; in ``files`` is all, weights and format,
    too.
    """
    print("\n| format | optimizer | state | files |")
    print("|---|---|---|---|")
