"""Checks that fail, hang or are killed, for the tests of ``megatron-muon accept``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.accept.outcome import Figure, Finding
from megatron_muon.lab.accept.settings import Settings

FILE = "ACCEPTING_FILE"  # names a file that a check writes to


def fine(settings: Settings) -> Sequence[Finding]:
    _note("fine")
    return [Finding("a claim", "ok", f"on {settings.device}", (Figure("a time", "ms", 2.0, 2.1),))]


def other(settings: Settings) -> Sequence[Finding]:
    _note("other")
    return [Finding("another claim", "not run", "no GPU")]


def fails(settings: Settings) -> Sequence[Finding]:
    return [Finding("good", "ok"), Finding("bad", "FAILED", "2 is not 3")]


def raises(settings: Settings) -> Sequence[Finding]:
    print("before the error")
    raise ValueError("what | is <wrong>")


def claims_nothing(settings: Settings) -> Sequence[Finding]:
    return []


def exits(settings: Settings) -> Sequence[Finding]:
    os._exit(0)


def is_killed(settings: Settings) -> Sequence[Finding]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still there")


def crashes(settings: Settings) -> Sequence[Finding]:
    import ctypes

    ctypes.string_at(0)
    raise AssertionError("still there")


def hangs(settings: Settings) -> Sequence[Finding]:
    """With a process of its own, which must end, too; its number goes to the file."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    _note(str(child.pid))
    time.sleep(600)
    return []


def kills_the_command(settings: Settings) -> Sequence[Finding]:
    """As a node that goes down: the command is gone at once."""
    _note("kills")
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
    return []


def _note(text: str) -> None:
    if FILE in os.environ:
        with Path(os.environ[FILE]).open("a") as file:
            file.write(f"{text}\n")
