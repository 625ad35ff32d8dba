"""Ranks end with their command: quietly at Ctrl-C, with the status of shells, and at a
kill.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from support import ROOT
from support.benching import SMALL, environment


def processes_of(session: int) -> list[psutil.Process]:
    """Those that are alive in a session."""
    processes = []
    for process in psutil.process_iter():
        try:
            if (
                os.getsid(process.pid) == session
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                processes.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return processes


def wait_until(is_over: Callable[[], bool], seconds: float) -> bool:
    """Whether it is, after at most so many seconds."""
    end = time.monotonic() + seconds
    while not is_over() and time.monotonic() < end:
        time.sleep(0.05)
    return is_over()


BENCH = f"bench step {SMALL} --tp 1 --dp 2 --rounds 100000 --rows adamw"
PLAN = "plan --model llama3-8b --tp 8 --world-size 16384"


# with the bench 3: fork server and resource tracker, which still import; 5: the ranks,
# too
@pytest.mark.parametrize("command, processes", [(BENCH, 3), (BENCH, 5), (PLAN, 1)])
def test_ctrl_c_ends_a_command_and_its_ranks(command: str, processes: int) -> None:
    """It answers within 2 s on an idle machine; the bound is for a busy one."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_muon", *command.split()],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # it hears of Ctrl-C whatever this process does
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    # its sign of life; what is heavy is imported behind it
    assert b": importing torch and Megatron\n" in process.stderr.readline()
    assert wait_until(lambda: len(processes_of(process.pid)) >= processes, 120)
    time.sleep(0.5)  # until the command waits for the fork server, or for the ranks
    began = time.monotonic()
    # a terminal sends it to every process in the foreground
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - began < 10
    # where it comes while torch's import runs code of its own, Python ends by the signal;
    # to a shell both are 130
    assert process.returncode in (130, -signal.SIGINT), said.decode()
    assert b"Traceback" not in said and b"KeyboardInterrupt" not in said, said.decode()
    # triton 3.9 may complain of leaks behind it
    assert (
        b"stopped, with all processes that it started; no result is written\n" in said
    )
    assert wait_until(lambda: processes_of(process.pid) == [], 5)


def test_ranks_end_when_the_command_is_killed() -> None:
    code = (
        "import time; from megatron_muon.lab.ranks import Task, run_ranks\n"
        "run_ranks(Task(run=time.sleep, argument=100, world=2, gpus=False, threads=1, "
        "seconds=99))"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=environment()) as command:
        started = psutil.Process(command.pid)
        # a resource tracker, the fork server, and its two ranks
        assert wait_until(lambda: len(started.children(recursive=True)) >= 4, 100)
        ranks = started.children(recursive=True)
        command.kill()
    assert psutil.wait_procs(ranks, timeout=30)[1] == []


def test_what_a_rank_started_ends_with_it_when_it_is_killed() -> None:
    """As the processes that Megatron's save starts."""
    job = (
        "import os, subprocess; subprocess.Popen(['sleep', '99']); "
        "os.kill(os.getpid(), 9)"
    )
    code = (
        "from megatron_muon.lab.ranks import Task, run_ranks\n"
        f"run_ranks(Task(exec, {job!r}, world=1, gpus=False, threads=1, seconds=99))"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert command.wait(timeout=100) == 1
    assert wait_until(lambda: processes_of(command.pid) == [], 20)
