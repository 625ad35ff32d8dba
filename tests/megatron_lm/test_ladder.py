"""examples/evidence/ladder.py: a run can be ended anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support import ROOT
from support.processes import environment

EVIDENCE = ROOT / "examples" / "evidence"
TINY = (
    "--num-layers=1 --hidden-size=32 --ffn-hidden-size=64 --num-attention-heads=2 "
    "--seq-length=32 --global-batch-size=4 --micro-batch-size=4 --eval-iters=1 "
    "--lr-warmup-iters=1"
).split()


def climbing(folder: Path, every: int) -> subprocess.Popen[str]:
    words = [sys.executable, str(EVIDENCE / "ladder.py"), "26M", "--only", "muon"]
    words += ["--factors", "1", "--steps", "4", "--every", str(every), *TINY]
    words += ["--work", str(folder / "work"), "--figures", str(folder)]
    folder.mkdir(exist_ok=True)
    (folder / "rules_larger.json").write_text('{"muon": {"lr": 0.02}}')
    tuned = (EVIDENCE / "figures" / "tuning.json").read_text()
    (folder / "tuning.json").write_text(tuned)
    return subprocess.Popen(
        words, env=environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def losses(folder: Path, every: int) -> Any:
    process = climbing(folder, every)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out
    return json.loads((folder / "ladder.json").read_text())


@pytest.mark.timeout(400)
def test_a_run_that_is_killed_goes_on_from_its_last_save(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    killed = climbing(cut, 2)
    while not (pieces := list(cut.glob("work/26M_muon_lr0.02_*/to_2.json"))):
        assert killed.poll() is None
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (first,) = pieces
    began = first.stat().st_mtime_ns
    found = losses(cut, 2)
    assert found == losses(whole, 4)
    assert first.stat().st_mtime_ns == began  # the first piece was not trained again
