"""``megatron-muon checkpoint`` on checkpoints of real runs: what it says, its
status.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_muon.lab.commands import main
from megatron_muon.mcore.checkpoint import manifest
from support.checkpoints import sealing
from support.checkpoints.inspecting import (
    CASE,
    DEFAULT,
    EVERY,
    TRACKER,
    faults,
    inspect,
)
from support.models.gpt import Topology, muon_weights
from support.processes import ended, without_launcher
from support.ranks import run

SHAPES = {
    "tp": (CASE, Topology(tp=2)),
    "experts": (replace(CASE, moe=True), Topology.of("dp2 ep2")),
}


@pytest.mark.parametrize("format", EVERY)
@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_are_those_of_the_run(
    shape: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, topology = SHAPES[shape]
    run(sealing.saved, topology.world_size, case, topology, format, str(tmp_path))
    status, report = inspect(tmp_path, capsys, "--hash")
    assert status == 0, report["faults"]
    facts, rows = report["facts"], report["matrices"]
    assert facts["format"] == ("torch" if format == "torch" else "torch_dist")
    assert (
        "momentum 0.95" in facts["settings"] and "world_size 2" in facts["written by"]
    )
    muons = muon_weights(case)
    if not case.moe:  # of whose experts a layer's are one row
        assert rows.keys() == muons
    qkv = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert rows[qkv] == {"96 x 96": 1, "32 x 96": 2}


def test_every_file_is_held_against_the_digest(
    sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(path for path in sealed.rglob("*") if path.is_file())
    for file in (path for path in files if path.name != manifest.FILE_NAME):
        data = file.read_bytes()
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        file.write_bytes(changed)
        assert faults(sealed, capsys) == ""
        assert f"{file} is damaged" in faults(sealed, capsys, "--hash")
        file.write_bytes(data[:-1])
        assert f"{file} has {len(data) - 1} bytes, {len(data)} were written" in faults(
            sealed, capsys
        )
        file.unlink()
        assert f"{file} is missing" in faults(sealed, capsys)
        file.write_bytes(data)


def test_a_save_that_did_not_end(
    sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest.begin(sealed)
    assert "was stopped before its end" in faults(sealed, capsys)


# --- without a digest -----------------------------------------------------------------


def test_without_a_digest_nothing_is_unpickled(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = folder.with_name("canary")
    for file in (path for path in folder.rglob("*") if path.is_file()):
        file.write_bytes(pickle.dumps(_Touch(canary)))
    assert faults(folder, capsys, "--hash") == "" and not canary.exists()


def test_an_adamw_checkpoint_has_no_digest_and_no_fault(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\n\nno digest: AdamW's, or saved without\n")
    assert "complete" not in out


class _Touch:
    """Its pickle makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.canary),)


# --- where it looks -------------------------------------------------------------------


def test_the_tracker_file_leads_to_the_checkpoint(
    sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = sealed.parent / TRACKER
    tracker.write_text("3")
    for path in (sealed.parent, sealed):
        status, report = inspect(path, capsys)
        assert (status, report["facts"]["iteration"]) == (0, "3")
        assert report["facts"]["checkpoint"] == str(sealed)
    tracker.write_text("5")
    assert "names iter_0000005, which is not there" in faults(sealed.parent, capsys)
    tracker.write_text("")
    assert "neither the number of an iteration" in faults(sealed.parent, capsys)


def test_no_checkpoint_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.txt").write_text("no checkpoint")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file.txt"):
        assert main(["checkpoint", "inspect", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("whole_one", [DEFAULT], indirect=True)
def test_inspect_runs_as_a_program(sealed: Path) -> None:
    """No launcher's environment, no GPU, no verb; in the C locale other letters are
    escaped.
    """
    folder = Path(shutil.copytree(sealed, sealed.with_name("Прогон")))
    env = without_launcher(PYTHONIOENCODING="ascii")
    command = sys.executable, "-m", "megatron_muon", "checkpoint", folder
    done = ended(*command, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr == ""
        and "\ncomplete" in done.stdout
        and r"\u041f\u0440" in done.stdout
    )


# --- exit status ----------------------------------------------------------------------


def test_a_fault_of_the_command_has_a_separate_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_muon.lab.inspect import report

    monkeypatch.setattr(report, "examine", lambda *_, **__: {}["a mistake\nof ours"])
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 3
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert str(tmp_path) in said.err and "KeyError: 'a mistake" in said.err
