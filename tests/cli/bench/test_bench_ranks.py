"""The ranks of ``megatron-muon bench``: they end with the command, and their errors are its own."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from support.benching import environment


def test_ranks_end_when_the_command_is_killed() -> None:
    code = (
        "import time; from megatron_muon.lab.ranks import Task, run_ranks\n"
        "run_ranks(Task(run=time.sleep, argument=100, world=2, gpus=False, threads=1, seconds=99))"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=environment()) as command:
        started = psutil.Process(command.pid)
        until = time.monotonic() + 100
        # a resource tracker, the fork server, and its two ranks
        while len(ranks := started.children(recursive=True)) < 4:
            assert time.monotonic() < until and command.poll() is None
            time.sleep(0.1)
        command.kill()
    assert psutil.wait_procs(ranks, timeout=30)[1] == []
