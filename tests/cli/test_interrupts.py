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
    "help": ["--help"],
    "no command": [],
    "routes": ["routes", *TINY],
    "doctor": ["doctor"],
    "checkpoint": ["checkpoint", "--help"],
    "bench": ["bench", "--help"],
    "newton-schulz": "bench newton-schulz --rounds 1 --shapes 8x8".split(),
    "speeds": "bench speeds --ranks 1 --shape 8x8".split(),
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
    ("name", "python"),
    [*((name, ()) for name in COMMANDS), ("routes", ("-u",))],
)
def test_a_command_whose_output_nobody_reads_ends_quietly(
    name: str, python: tuple[str, ...]
) -> None:
    """With ``-u`` the first line fails, else the flush at the end."""
    # argparse's own help hides the error; and a usage goes to stderr
    expected = {"checkpoint": (0, 141), "no command": (2,)}.get(name, (141,))
    with without_reader() as gone:
        process = started(COMMANDS[name], gone, subprocess.PIPE, *python)
        _, said = process.communicate(timeout=280)
    text = said.decode()
    assert process.returncode in expected, text
    assert "Traceback" not in text and "Broken pipe" not in text and "Exception" not in text, text


@pytest.mark.parametrize("name", ["no command", "routes"])
def test_so_does_one_whose_errors_nobody_reads(name: str) -> None:
    with without_reader() as gone:
        process = started([*COMMANDS[name]], gone, gone)
        process.communicate(timeout=280)
    assert process.returncode == 141


def test_head_reads_the_first_line_and_no_more() -> None:
    shell = f"{' '.join(MEGATRON_MUON)} routes --help | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("usage: ") and lines[1] in ("0", "141") and not done.stderr


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


def wait_for(process: subprocess.Popen[bytes], text: str) -> bytes:
    """What it says on stderr up to that."""
    said = b""
    assert process.stderr is not None
    while text.encode() not in said:
        line = process.stderr.readline()
        assert line, said.decode()
        said += line
    return said


WITH_RANKS = {
    "step": (f"bench step {SMALL} --tp 1 --dp 2 --rounds 100000 --rows adamw", "round 2 of"),
    "speeds": ("bench speeds --ranks 2 --shape 8192x8192", ""),
}


@pytest.mark.parametrize(("name", "to_all"), [("step", True), ("speeds", False)])
def test_ctrl_c_ends_a_command_and_its_ranks(name: str, to_all: bool) -> None:
    arguments, sign = WITH_RANKS[name]
    process = started(arguments.split(), subprocess.PIPE, subprocess.PIPE)
    said = wait_for(process, sign) if sign else b""
    wait_until_ranks_are_there(process)
    if to_all:  # a terminal sends it to every process in the foreground
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)
    text = (said + rest[1]).decode()
    assert process.returncode == 130, text
    assert "Traceback" not in text and "KeyboardInterrupt" not in text, text
    end = time.monotonic() + 20
    while (left := processes_of(process.pid)) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []


def wait_until_ranks_are_there(process: subprocess.Popen[bytes]) -> None:
    """Two ranks, the fork server and the resource tracker beside the command."""
    end = time.monotonic() + 120
    while len(processes_of(process.pid)) < 5:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def test_ctrl_c_ends_a_command_without_ranks() -> None:
    arguments = "bench newton-schulz --rounds 1000000 --shapes 8x8".split()
    process = started(arguments, subprocess.PIPE, subprocess.PIPE)
    assert process.stdout is not None
    while b"| --- |" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in said, said.decode()
