"""Checkpoints of real runs, their digests, and the output of ``megatron-muon checkpoint
inspect``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.commands import main
from megatron_muon.mcore.checkpoint import manifest
from support.checkpoints.saving import formats, save_new
from support.models.gpt import Case, Topology
from support.ranks import run

CASE = Case(steps=2)
DEFAULT, *_ = EVERY = formats()
DP2 = Topology(dp=2)
TRACKER = "latest_checkpointed_iteration.txt"
NAME = "decoder.layers.1.mlp.linear_fc1.weight"


def inspect(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """(exit status, the report)."""
    status = main(["checkpoint", "inspect", str(path), "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def faults(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """All that is not complete, which must be the exit status, too."""
    status, report = inspect(path, capsys, *options)
    assert status == bool(report["faults"])
    return "\n".join(report["faults"])


def saved(folder: Path, format: str) -> None:
    """A checkpoint of a run."""
    run(save_new, DP2.world_size, CASE, DP2, format, str(folder))


def as_megatron_lm(folder: Path) -> None:
    """The first rank's file of the format torch, by the name that Megatron-LM gives
    it.
    """
    for file in folder.glob("0_0_0_model_optim.pt"):
        (folder / "mp_rank_00").mkdir()
        file.rename(folder / "mp_rank_00" / "model_optim_rng.pt")


def seal(folder: Path, **other: Any) -> None:
    """A digest of what is there, as a save writes it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    kept = {str(p.relative_to(folder)): p for p in files if not manifest.is_own(p.name)}
    said = {
        "wrote": {"megatron_muon": "9.8.7", "world_size": 2},
        "record": {
            "settings": {"momentum": 0.5},
            "matrices": {NAME: {"260 x 96": 1}},
        },
        "files": {
            name: manifest.entry(path, written=False) for name, path in kept.items()
        },
    }
    manifest.finish(folder, manifest.begin(folder), {**said, **other})
