"""examples/evidence/compare.py: real trainings over gloo, its report, and going on
after an end.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support import ROOT
from support.processes import python

EVIDENCE = ROOT / "examples" / "evidence"
SMALL = (
    "--steps 5 --hidden 64 --heads 4 --layers 2 --vocab 256 --seq 32 "
    "--global-batch-size 8 --lr-adamw 1e-2 --lr-muon 5e-2"
).split()


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script as a module, as its ranks import its others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EVIDENCE))
        yield importlib.import_module("compare")
        for name in ("compare", "compare_ranks", "planned", "topologies"):
            sys.modules.pop(name, None)


def trainings(said: str) -> list[str]:
    return re.findall(r"^training (\S+), \d+ of \d+$", said, re.MULTILINE)


def topologies(folder: Path) -> list[dict[str, Any]]:
    report = json.loads((folder / "report.json").read_text())
    found: list[dict[str, Any]] = report["topologies"]
    return found


@pytest.fixture(scope="module")
def folder(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report over two ranks of DP, of TP, and of two stages."""
    made = tmp_path_factory.mktemp("compare")
    script.main([*SMALL, "--folder", str(made), "--topologies", "dp2", "tp2", "pp2"])
    return made


def test_bytes_and_memory_are_those_of_the_plan(folder: Path) -> None:
    for each in topologies(folder):
        planned = each["predicted"]
        assert each["muon"]["exchange"] == planned["exchange"]
        assert each["muon"]["busiest"] == planned["busiest"]
        assert each["adamw"]["exchange"] == 0
        assert each["adamw"]["megatrons"] == each["muon"]["megatrons"]
        for name in ("adamw", "muon"):
            measured = each[name]["state_bytes"]
            assert measured == pytest.approx(planned[f"{name}_state"], rel=0.02)
        assert each["muon"]["state_bytes"] < each["adamw"]["state_bytes"]
    ratios = {each["name"]: each["byte_ratio"] for each in topologies(folder)}
    assert ratios["tp2"] is ratios["pp2"] is None and 1 <= ratios["dp2"] < 1.1


def test_both_train_and_the_page_has_every_topology_in_every_table(
    folder: Path,
) -> None:
    page = (folder / "report.md").read_text()
    for each in topologies(folder):
        for name in ("adamw", "muon"):
            losses = each[name]["losses"]
            assert len(losses) == 5 and losses[-1] < losses[0] - 0.1
            assert f"{losses[0]:.3f}, {losses[-1]:.3f}" in page
        assert each["adamw"]["losses"][0] == each["muon"]["losses"][0]
        assert page.count(f"| {each['name']} |") == 3
    assert "AdamW sends none" in page and "1.333 times AdamW's" in page


def test_a_second_call_trains_what_is_missing_or_other_only(
    script: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be read is missing."""
    shutil.copy(folder / "dp2-adamw.json", tmp_path)
    (tmp_path / "dp2-muon.json").write_text('{"of": ')
    words = [*SMALL, "--folder", str(tmp_path), "--topologies", "dp2"]
    for more in ([], ["--lr-muon", "0.02"]):
        script.main([*words, *more])
        assert trainings(capsys.readouterr().err) == ["dp2-muon"]


def test_under_a_launcher_its_ranks_train_what_is_missing(
    folder: Path, tmp_path: Path
) -> None:
    """They have the other training from the first rank, which reads it."""
    shutil.copy(folder / "tp2-adamw.json", tmp_path)
    words = "-m torch.distributed.run --standalone --nproc-per-node=2".split()
    words += [str(EVIDENCE / "compare.py"), *SMALL, "--folder", str(tmp_path)]
    done = python(
        *words,
        "--topologies",
        "tp2",
        "dp4",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    assert trainings(done.stderr) == ["tp2-muon"]
    (each,) = topologies(tmp_path)
    assert each["name"] == "tp2"
    assert each["muon"]["exchange"] == each["predicted"]["exchange"] > 0
