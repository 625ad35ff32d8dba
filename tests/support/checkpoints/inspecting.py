"""Checkpoints of real runs, digests of them, what ``megatron-muon checkpoint inspect`` says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.commands import main
from megatron_muon.mcore.load_check import digest
from megatron_muon.mcore.load_check.checksum import checksum
from support.checkpoints.saving import formats, save
from support.installed import lacks
from support.models.gpt import Case, Topology, held, stepped
from support.ranks import run
from support.runs.whole import Whole, whole

CASE = Case(steps=2)
DEFAULT, *_ = EVERY = formats()
DP2 = Topology(dp=2)
TRACKER = "latest_checkpointed_iteration.txt"
NAME = "decoder.layers.1.mlp.linear_fc1.weight"


def inspect(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """(exit status, the report)."""
    status = main(["checkpoint", "inspect", str(path), "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def inspected(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """(exit status, what it says); a traceback would fail the test."""
    status = main(["checkpoint", "inspect", str(path), *options])
    said = capsys.readouterr()
    return status, said.out + said.err


def one_of_each_kind(folder: Path) -> list[str]:
    """A file of each kind, by name; not the digest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kinds = {p.name.lstrip("_0123456789"): str(p.relative_to(folder)) for p in files}
    kinds.pop(digest.FILE_NAME, None)
    return sorted(set(kinds.values()) - {"metadata.json"})


def faults(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """All that is not complete, which must be the exit status, too."""
    status, report = inspect(path, capsys, *options)
    assert status == bool(report["faults"])
    return "\n".join(report["faults"])


def save_and_hold(
    case: Case, topology: Topology, format: str, folder: str, change: Callable[[Any], None] | None
) -> dict[str, Any]:
    """On a rank: save a run that has taken the case's steps; what it held."""
    built = stepped(case, topology)
    if change is not None:
        change(built)
    save(built, folder, format)
    return held(built)


def saved(
    folder: Path,
    format: str,
    topology: Topology = DP2,
    case: Case = CASE,
    change: Callable[[Any], None] | None = None,
) -> Whole:
    """A checkpoint of a run; what the run held, nothing where it was changed before the save."""
    if lacking := lacks(case, topology):
        pytest.skip(lacking)
    args = (case, topology, format, str(folder), change)
    results = run(save_and_hold, topology.world_size, *args)
    return whole(results) if change is None else {}


def as_megatron_lm(folder: Path) -> None:
    """The first rank's file of the format torch, by the name that Megatron-LM gives it."""
    for file in folder.glob("0_0_0_model_optim.pt"):
        (folder / "mp_rank_00").mkdir()
        file.rename(folder / "mp_rank_00" / "model_optim_rng.pt")


def seal(folder: Path, **other: Any) -> None:
    """A digest of what is there, as a save writes it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    kept = {str(p.relative_to(folder)): p for p in files if not digest.own_file(p.name)}
    said = {
        "wrote": {"megatron_muon": "9.8.7", "world_size": 2},
        "settings": {"momentum": 0.5},
        "parameters": {NAME: {"shape": [260, 96], "optimizer": "muon"}},
        "files": {
            name: {"size": path.stat().st_size, "hash": checksum(path)}
            for name, path in kept.items()
        },
    }
    digest.finish(folder, {**said, **other})
