"""A run of the tests ends with what it started."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from support import left_running


def test_what_a_run_leaves_behind_is_named_and_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(left_running, "SECONDS", 1.0)
    mark = f"a test of {os.getpid()}"
    environment = {**os.environ, left_running.NAME: mark}
    with subprocess.Popen(["sleep", "99"], env=environment) as sleeper:
        while not left_running.marked(mark):  # in exec a process has no environment
            time.sleep(0.01)
        assert left_running.main(mark) == 1
        assert sleeper.wait(timeout=10) != 0
    assert f"left running: {sleeper.pid} sleep 99" in capsys.readouterr().out
    assert left_running.main(mark) == 0
