"""``megatron-muon accept`` runs the clone's tests on GPUs, and its report says how each
ended.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.accept import command
from megatron_muon.lab.accept.report import ROWS, STEP, recommended
from megatron_muon.lab.accept.results import Check, Figure, Outcome, Verdict
from megatron_muon.lab.commands import main
from support import ROOT
from support.benching import environment

MADE = """
import os, signal, time
import pytest
from megatron_muon.lab.accept.results import Figure

pytestmark = pytest.mark.gpu

def test_it_holds(report):
    report(Figure("a time", "ms", 2.0, 4.0, constant="launch_us", value=9.0), text="<two> | ranks")
    time.sleep(SECONDS)

def test_it_fails():
    assert 2 == 3

@pytest.mark.timeout(0.5)
def test_it_hangs():
    time.sleep(60)

@pytest.mark.parametrize("name", ["a b"])
def test_it_cannot_run(name, needs_gpu):
    needs_gpu()
"""
KILLED = "import os, signal\nimport pytest\npytestmark = pytest.mark.gpu\n"
KILLED += "def test_it_ends():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
Accepted = tuple[int, dict[str, Any], str]


def accepted(folder: Path, *words: str) -> Accepted:
    """Exit status, checks by name, and the report."""
    status = main(["accept", str(folder), "--device", "cpu", *words])
    found = json.loads((folder / "accept.json").read_text())
    return (
        status,
        {check["name"]: check for check in found["checks"]},
        ((folder / "accept.md").read_text()),
    )


def made(tree: Path, patch: pytest.MonkeyPatch, **files: str) -> None:
    """Have the command run other files than those of tests/gpu."""
    gpu = tree / "tests" / "gpu"
    gpu.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", tree / "tests")
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", gpu)
    (tree / "tests" / "slow.txt").touch()
    for name, text in files.items():
        (gpu / f"test_gpu_{name}.py").write_text(text)
    patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    patch.setattr(command, "_tests", lambda: gpu)


def test_it_runs_the_tests_of_the_clone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, checks, report = accepted(tmp_path, "--only", "training")
    assert status == 0
    assert {name: check["verdict"] for name, check in checks.items()} == {
        **dict.fromkeys(
            ("bits", "checkpoint", "cost", "doctor", "newton_schulz"), "not run"
        ),
        **dict.fromkeys(("sanitizer", "step"), "not run"),
        "training": "ok",
    }
    assert checks["training"]["tests"][0]["text"].startswith("loss ")
    said = capfd.readouterr().out
    assert said.startswith("No check failed. ") and "accept.md" in said
    assert "| ranks | 2 |" in report
    assert str(tmp_path) not in report and "site-packages" not in report


def test_every_end_of_a_test_is_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "tree", monkeypatch, made=MADE.replace("SECONDS", "0"))
    status, checks, report = accepted(tmp_path / "out")
    assert status == 1 and checks["made"]["verdict"] == "FAILED"
    verdicts = {test["name"]: test["verdict"] for test in checks["made"]["tests"]}
    assert verdicts == {
        "it holds": "ok",
        "it fails": "FAILED",
        "it hangs": "FAILED",
        "it cannot run, a b": "not run",
    }
    assert "| &lt;two&gt; \\| ranks" in report and "Timeout (>0.5s)" in report
    assert "| made | a time | ms | 2 | 4 | 2 |" in report
    assert (
        "Corrects `launch_us`: set it to 9." in report and "--set launch_us=9" in report
    )
    assert "assert 2 == 3" in report and "| no GPU |" in report


def test_a_test_without_time_or_an_end_is_not_taken_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "late", monkeypatch, made=MADE.replace("SECONDS", "1"))
    status, checks, _ = accepted(tmp_path / "out", "--minutes", "0.01")
    assert status == 1
    assert [test["text"] for test in checks["made"]["tests"][1:]] == [
        "no time was left for it: see --minutes"
    ] * 3
    made(tmp_path / "killed", monkeypatch, killed=KILLED)
    status, checks, _ = accepted(tmp_path / "out")
    assert status == 1 and checks["killed"]["verdict"] == "FAILED"
    assert checks["killed"]["tests"][-1]["text"] == "pytest was ended by signal 9"


def test_flags_that_do_not_fit_the_machine_end_with_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["accept", str(tmp_path), "--device", "cpu", "--ranks", "3"]) == 2
    assert "--ranks 3: give 1 or an even number" in capfd.readouterr().err


def test_a_package_without_its_tests_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = (
        tmp_path / "site-packages" / "megatron_muon" / "lab" / "accept" / "command.py"
    )
    monkeypatch.setattr(command, "__file__", str(wheel))
    with pytest.raises(SystemExit) as ended:
        main(["accept", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert (
        "clone the repository, `pip install -e '.[test]'` there"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "fast, bits, training, preset",
    [
        (10.0, "ok", "ok", "fast"),
        (19.9, "ok", "ok", "safe"),
        (10.0, "ok", "FAILED", "safe"),
        (10.0, "ok", "not run", "safe"),
        (10.0, "not run", "ok", "safe"),
    ],
)
def test_fast_is_recommended_where_it_is_faster_and_every_check_for_it_was_run(
    fast: float, bits: Verdict, training: Verdict, preset: str
) -> None:
    times = {"safe": 20.0, "fast": fast}
    figures = tuple(
        Figure(f"{STEP}{ROWS[name]}", "ms", None, ms) for name, ms in times.items()
    )
    tests = {
        "bits": (Outcome("a", "ok"), Outcome("b", bits)),
        "training": (Outcome("a", training),),
    }
    tests["step"] = (Outcome("a", "ok", figures=figures),)
    said = recommended([Check(*check) for check in tests.items()])
    assert f"`--muon-preset {preset}`" in said
    assert ("both learn" in said) == (bits == training == "ok")
