"""A check that fails, hangs, crashes or is killed is a result of ``accept`` and not its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.accept import command
from megatron_muon.lab.accept.table import Check
from megatron_muon.lab.commands import main
from support.accepting import FILE
from support.benching import environment

CPU = ("accept", "--device", "cpu")


def check(name: str, seconds: float = 60.0) -> Check:
    return Check(name, "?", f"support.accepting:{name}", seconds)


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "noted"
    monkeypatch.setenv(FILE, str(path))
    return path


def accepted(
    monkeypatch: pytest.MonkeyPatch, folder: Path, checks: list[Check], *words: str
) -> tuple[int, dict[str, Any], str]:
    """Run the command over these checks; status, ``accept.json`` and ``accept.md``."""
    monkeypatch.setattr(command, "CHECKS", checks)
    status = main([*CPU, "--folder", str(folder), *words])
    written = json.loads((folder / "accept.json").read_text())
    return status, written, (folder / "accept.md").read_text()


def outcomes(written: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {outcome["check"]: outcome for outcome in written["outcomes"]}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", "2 is not 3"),
        ("raises", "ValueError: what | is <wrong>"),
        ("claims_nothing", "it made no claim"),
        ("exits", "it ended without a result"),
        ("is_killed", "it ended without a result; its process was ended by signal 9 (SIGKILL)"),
        ("crashes", "its process was ended by signal 11 (SIGSEGV)"),
        ("not_there", "AttributeError: module 'support.accepting' has no attribute 'not_there'"),
    ],
)
def test_it_is_reported_and_the_next_one_runs(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, written, text = accepted(monkeypatch, tmp_path, [check(name), check("fine")])
    assert status == 1
    bad = outcomes(written)[name]
    assert bad["verdict"] == "FAILED"
    assert said in " ".join(part["text"] for part in bad["parts"])
    assert outcomes(written)["fine"]["verdict"] == "ok"
    assert f"**FAILED: {name}.**" in text
    assert said.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;") in text


def test_the_end_of_its_output_is_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, text = accepted(monkeypatch, tmp_path, [check("raises")])
    assert "## Output of raises, its end" in text and "\nbefore the error\n" in text


def test_one_that_hangs_ends_at_its_limit_with_all_its_processes(
    tmp_path: Path, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    status, written, _ = accepted(monkeypatch, tmp_path, [check("hangs", 6.0)])
    assert status == 1 and time.monotonic() - start < 30
    (part,) = outcomes(written)["hangs"]["parts"]
    assert (part["verdict"], part["text"]) == ("FAILED", "no end within its 6 s")
    assert is_gone(int(noted.read_text()))


def is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_one_that_is_cut_short_by_the_minutes_is_not_run_and_runs_next_time(
    tmp_path: Path, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [check("hangs", 600.0), check("fine")]
    status, written, text = accepted(monkeypatch, tmp_path, checks, "--minutes", "0.1")
    assert status == 1
    for name, said in (("hangs", "--minutes ended after"), ("fine", "0.1 minutes were over")):
        (part,) = outcomes(written)[name]["parts"]
        assert part["verdict"] == "not run" and said in part["text"]
        assert not outcomes(written)[name]["is_final"]
    assert "Not run: hangs, fine." in text
    status, written, _ = accepted(monkeypatch, tmp_path, [check("fine")])
    assert status == 0 and outcomes(written)["fine"]["verdict"] == "ok"


def test_a_second_call_goes_on_and_only_runs_a_check_again(
    tmp_path: Path, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = [check("fine"), check("other")]
    assert accepted(monkeypatch, tmp_path, checks)[0] == 0
    assert accepted(monkeypatch, tmp_path, checks)[0] == 0
    assert noted.read_text().split() == ["fine", "other"]
    monkeypatch.setattr(command, "CHECKS", checks)
    assert accepted(monkeypatch, tmp_path, checks)[0] == 0
    assert noted.read_text().split() == ["fine", "other"]


def test_what_is_not_run_is_never_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, written, text = accepted(monkeypatch, tmp_path, [check("other")])
    assert outcomes(written)["other"]["verdict"] == "not run"
    assert "| · another claim | not run | no GPU |" in text and "Not run: other." in text


@pytest.mark.parametrize("what", ["device", "settings", "torch", "broken", "shape"])
def test_another_device_or_version_or_a_broken_file_starts_anew_and_says_why(
    what: str,
    tmp_path: Path,
    noted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks = [check("fine")]
    accepted(monkeypatch, tmp_path, checks)
    path = tmp_path / "accept.json"
    words: tuple[str, ...] = ()
    if what == "broken":
        path.write_text(path.read_text()[:100])
    elif what == "shape":
        path.write_text(path.read_text().replace('"verdict": "ok"', '"verdict": "good"'))
    elif what == "settings":
        words = ("--set", "launch_us=5")
    else:
        written = json.loads(path.read_text())
        written["identity"][what] = "another"
        path.write_text(json.dumps(written))
    capsys.readouterr()
    accepted(monkeypatch, tmp_path, checks, *words)
    said = capsys.readouterr().err.splitlines()[0]
    assert "starts anew" in said and "old.accept.json" in said
    assert ("cannot be read" if what in ("broken", "shape") else f"{what} was") in said
    assert noted.read_text().split() == ["fine", "fine"]
    assert (tmp_path / "old.accept.json").exists()


_COMMAND = """
from megatron_muon.lab.accept import command
from megatron_muon.lab.accept.table import Check
from megatron_muon.lab.commands import main
names = ("fine", "kills_the_command", "other")
command.CHECKS = [Check(name, "?", f"support.accepting:{name}", 60.0) for name in names]
raise SystemExit(main(["accept", "--device", "cpu", "--folder", FOLDER]))
"""


def test_a_command_that_is_killed_goes_on_and_gives_a_check_up_that_ends_it_twice(
    tmp_path: Path, noted: Path
) -> None:
    program = [sys.executable, "-c", _COMMAND.replace("FOLDER", repr(str(tmp_path)))]
    ended = [
        subprocess.run(program, env=environment(), capture_output=True, text=True, cwd=tmp_path)
        for _ in range(3)
    ]
    assert [each.returncode for each in ended] == [-9, -9, 1], [each.stderr for each in ended]
    assert noted.read_text().split() == ["fine", "kills", "kills", "other"]
    assert "kills_the_command ran when the last call ended, and is tried again" in ended[1].stderr
    by_check = outcomes(json.loads((tmp_path / "accept.json").read_text()))
    (part,) = by_check["kills_the_command"]["parts"]
    assert part["verdict"] == "FAILED"
    assert part["text"] == "2 calls of the command ended while it ran"
    assert by_check["other"]["verdict"] == "not run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--device", "cuda"], "--device cuda: torch sees no GPU here"),
        (["--ranks", "0"], "argument --ranks: must be a whole number of at least 1"),
        (["--ranks", "3"], "--ranks 3: give 1 or an even number"),
        (["--minutes", "-1"], "argument --minutes: must be a number from 0.01"),
        (["--only", "all"], "argument --only: invalid choice: 'all'"),
        (["--hardware", "tpu"], "--hardware tpu: neither a file nor one of h100"),
        (["--set", "launch=1"], "--set launch=1: give NAME=VALUE"),
        (["--json", "/no/such/file"], "--json /no/such/file: there is no folder"),
        (["--folder", "/no/such/folder"], "--folder /no/such/folder: No such file or directory"),
        (["--folder", "/dev/null"], "--folder /dev/null: File exists"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else None,
)
def test_wrong_flags_end_with_2_and_one_line(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["accept", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert os.listdir(tmp_path) in ([], ["megatron_muon_accept"])
