"""``| head`` and Ctrl-C end every command quietly, with the status that shells expect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import IO

import psutil
import pytest

from support import ROOT
from support.benching import SMALL, environment
from support.models.model_flags import TINY

MEGATRON_MUON = [sys.executable, "-m", "megatron_muon"]
COMMANDS = {
    "no command": [],
    "routes": ["routes", *TINY],
    "step": f"bench step {SMALL} --tp 1 --dp 1 --rounds 1 --rows adamw".split(),
}


def without_reader() -> IO[bytes]:
    """The end of a pipe that is written to, when the other one is closed."""
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "wb")


def started(
    arguments: list[str], stdout: IO[bytes] | int, stderr: IO[bytes] | int, *python: str
) -> subprocess.Popen[bytes]:
    """A command in a session of its own, which hears of Ctrl-C whatever this process does."""
    return subprocess.Popen(
        [MEGATRON_MUON[0], *python, *MEGATRON_MUON[1:], *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("name", "python"), [*((name, ()) for name in COMMANDS), ("routes", ("-u",))]
)
def test_a_command_whose_output_nobody_reads_ends_quietly(
    name: str, python: tuple[str, ...]
) -> None:
    """With ``-u`` the first line fails, else the flush at the end."""
    with without_reader() as gone:
        process = started(COMMANDS[name], gone, subprocess.PIPE, *python)
        _, said = process.communicate(timeout=280)
    text = said.decode()
    assert process.returncode == (141 if COMMANDS[name] else 2), text  # a usage goes to stderr
    assert "Traceback" not in text and "Broken pipe" not in text and "Exception" not in text, text


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


# with the command 3: fork server and resource tracker, which still import; 5: the ranks, too
@pytest.mark.parametrize("processes", [3, 5])
def test_ctrl_c_ends_a_command_and_its_ranks(processes: int) -> None:
    command = f"bench step {SMALL} --tp 1 --dp 2 --rounds 100000 --rows adamw"
    process = started(command.split(), subprocess.PIPE, subprocess.PIPE)
    end = time.monotonic() + 120
    while len(processes_of(process.pid)) < processes:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.5)  # until the command waits for the fork server, or for the ranks
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process in the foreground
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said.decode()
    assert b"Traceback" not in said and b"KeyboardInterrupt" not in said, said.decode()
    # triton 3.9 may complain of leaks behind it
    assert b"stopped, with all processes that it started; no result is written\n" in said
    end = time.monotonic() + 20
    while (left := processes_of(process.pid)) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []
