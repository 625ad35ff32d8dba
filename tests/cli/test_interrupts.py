"""Ctrl-C ends a command and its ranks quietly, with the status that shells expect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

from support import ROOT
from support.benching import SMALL, environment


def processes_of(session: int) -> list[psutil.Process]:
    """Those that are alive in a session."""
    processes = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return processes


def wait_until_ranks_are_there(process: subprocess.Popen[bytes]) -> None:
    """Two ranks, the fork server and the resource tracker beside the command."""
    end = time.monotonic() + 120
    while len(processes_of(process.pid)) < 5:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def test_ctrl_c_ends_a_command_and_its_ranks() -> None:
    command = f"bench step {SMALL} --tp 1 --dp 2 --rounds 100000 --rows adamw"
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_muon", *command.split()],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # it hears of Ctrl-C whatever this process does
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until_ranks_are_there(process)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process in the foreground
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said.decode()
    assert b"Traceback" not in said and b"KeyboardInterrupt" not in said, said.decode()
    assert b"stopped, with all processes that it started; no result is written\n" in said
    end = time.monotonic() + 20
    while (left := processes_of(process.pid)) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []
