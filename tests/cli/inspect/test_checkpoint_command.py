"""``megatron-muon checkpoint inspect`` on checkpoints of real runs: what it says, its status."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_muon.lab.commands import main
from megatron_muon.lab.inspect.contents import canonical
from support.checkpoints.inspecting import CASE, DEFAULT, EVERY, NAME, faults, inspect, saved, seal
from support.models.gpt import Topology, muon_weights

# --- what it says -----------------------------------------------------------------------------

SHAPES = {
    "tp": (CASE, Topology(2, 1, 2, overlap=True)),
    "pp": (CASE, Topology(1, 2, 1)),
    "experts": (replace(CASE, moe=True), Topology(dp=2, ep=2)),
    "fp32": (replace(CASE, bf16=False), Topology(dp=2)),
}


@pytest.mark.parametrize("format", EVERY)
@pytest.mark.parametrize("shape", SHAPES)
def test_names_shapes_and_optimizers_are_those_of_the_run(
    shape: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, topology = SHAPES[shape]
    truth = saved(tmp_path, format, topology, case)
    status, report = inspect(tmp_path, capsys)
    assert status == 0, report["faults"]
    assert report["facts"]["format"] == (format if format == "torch" else f"torch_dist, {format}")
    assert "momentum 0.95" in report["facts"]["settings"]
    rows = {row["name"]: row for row in report["parameters"]}
    names = {canonical(name): name for name in truth["main"]}
    assert rows.keys() == names.keys()
    for name, row in rows.items():
        assert row["optimizer"] == ("muon" if names[name] in muon_weights(case) else "adamw")
        numel = truth["main"][names[name]].numel()
        listed = torch.Size(row["shape"]).numel()
        assert listed == numel or (row["is_part"] and listed * topology.tp == numel)
        if not row["is_part"] and shape != "fp32" and format != "dp_zero_gather_scatter":
            assert listed == numel


@pytest.mark.parametrize("format", EVERY)
def test_bytes_by_kind(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = saved(tmp_path, format)
    _, report = inspect(tmp_path, capsys)
    sizes = report["bytes"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sizes["total"] == sum(path.stat().st_size for path in files)
    muons = muon_weights(CASE)
    numel = {name: tensor.numel() for name, tensor in truth["main"].items()}
    assert sizes["momentum"] == 4 * sum(numel[name] for name in muons)
    assert sizes["AdamW's moments"] == 8 * sum(numel[name] for name in numel.keys() - muons)
    assert sizes["model"] == 2 * sum(numel.values())
    padding = sizes["main parameters"] - 4 * sum(numel.values())
    assert 0 <= padding < 4 * 64 * len(numel)
    assert sizes["total"] == sum(sizes.values()) - sizes["total"]


def test_a_line_for_each_in_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, DEFAULT)
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.endswith("\ncomplete\n")
    (line,) = (line for line in text.split("\n") if line.startswith(NAME))
    assert "260 x 96" in line and "muon" in line


@pytest.mark.parametrize("format", EVERY)
def test_what_the_digest_says_is_believed(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = saved(tmp_path, format, Topology(2, 1, 2))
    seal(tmp_path, truth)
    status, report = inspect(tmp_path, capsys, "--hash")
    assert status == 0, report["faults"]
    assert "megatron_muon 9.8.7" in report["facts"]["written by"]
    assert report["facts"]["settings"] == "momentum 0.5"
    rows = {row["name"]: row for row in report["parameters"]}
    assert rows.keys() == {canonical(name) for name in truth["main"]}
    for name, tensor in truth["main"].items():
        row = rows[canonical(name)]
        assert (tuple(row["shape"]), row["is_part"]) == (tuple(tensor.shape), False)


# --- where it looks ---------------------------------------------------------------------------


def test_the_tracker_file_leads_to_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    saved(folder, DEFAULT)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("3")
    for path in (tmp_path, folder):
        status, report = inspect(path, capsys)
        assert (status, report["facts"]["iteration"]) == (0, "3")
        assert report["facts"]["checkpoint"] == str(folder)
    tracker.write_text("5")
    assert "names iter_0000005, which is not there" in faults(tmp_path, capsys)
    tracker.write_text("")
    assert "names no iteration" in faults(tmp_path, capsys)


def test_no_checkpoint_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.txt").write_text("no checkpoint")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file.txt"):
        assert main(["checkpoint", "inspect", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoint", "repair", str(tmp_path)])


# --- others ------------------------------------------------------------------------------------


def test_an_adamw_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, DEFAULT, case=replace(CASE, optimizer="adam"))
    status, report = inspect(tmp_path, capsys)
    assert status == 0
    assert report["facts"]["optimizer"] == "AdamW"
    assert report["facts"]["written by"] == "a Megatron without megatron_muon"
    assert report["bytes"]["momentum"] == 0


def test_as_a_program_by_itself(tmp_path: Path) -> None:
    """No launcher's environment and no GPU."""
    saved(tmp_path, DEFAULT)
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "CUDA_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "megatron_muon", "checkpoint", "inspect", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and "\ncomplete" in done.stdout
