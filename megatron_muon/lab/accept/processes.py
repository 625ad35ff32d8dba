"""A check in a process of its own: a crash, a kill or a hang of it is a result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from megatron_muon.lab.accept.outcome import (
    Finding,
    Outcome,
    failed,
    not_run,
    parts_from_json,
)
from megatron_muon.lab.accept.settings import Settings
from megatron_muon.lab.accept.table import Check

_LINES = 25  # of a failed check's output in the report


def run_check(check: Check, settings: Settings, folder: Path, left: float) -> Outcome:
    """Run a check.

    Args:
        check: the check.
        settings: its settings.
        folder: takes its output, ``NAME.log``.
        left: seconds until the command must end.

    Returns:
        Its outcome. If ``left`` ends it before its own limit, it is not final.

    Raises:
        OSError: the folder cannot be written.
    """
    log, result = folder / f"{check.name}.log", folder / f"{check.name}.result"
    result.unlink(missing_ok=True)
    start = time.monotonic()
    with log.open("wb") as output:
        code = _ended(check, settings, result, output, min(check.seconds, left))
    seconds = time.monotonic() - start
    tail = _tail(log)
    try:
        if code is None and left < check.seconds:
            why = f"the call's --minutes ended after {seconds:.0f} s of it"
            return not_run(check.name, why, is_final=False)
        if code is None:
            return failed(check.name, f"no end within its {check.seconds:g} s", seconds, tail)
        return _outcome(check.name, code, result, seconds, tail)
    finally:
        result.unlink(missing_ok=True)


def _ended(
    check: Check, settings: Settings, result: Path, output: IO[bytes], limit: float
) -> int | None:
    """The exit status of the check's process; None where it was ended at the limit."""
    command = [sys.executable, "-m", "megatron_muon.lab.accept.child"]
    process = subprocess.Popen(
        [*command, check.run, settings.as_json(), str(result), str(int(check.builds))],
        stdin=subprocess.PIPE,  # its end tells the child that this process is gone
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment(),
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # also ranks that outlive the check
        process.wait()


def environment() -> dict[str, str]:
    """The environment of a process that imports what this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _outcome(name: str, code: int, result: Path, seconds: float, tail: str) -> Outcome:
    """The outcome of a check that has ended by itself or was killed."""
    parts: tuple[Finding, ...] = ()
    faults = []
    try:
        parts = parts_from_json(json.loads(result.read_text()))
    except FileNotFoundError:
        faults.append("it ended without a result")
    except (ValueError, RecursionError) as error:
        faults.append(f"its result cannot be read: {error}")
    if not parts and not faults:
        faults.append("it made no claim")
    if code < 0:
        faults.append(f"its process was ended by {_signal(-code)}")
    elif code and not any(part.verdict == "FAILED" for part in parts):
        faults.append(f"its process ended with status {code}")
    if faults:
        parts = (*parts, Finding("its process ends well", "FAILED", "; ".join(faults)))
    is_good = all(part.verdict != "FAILED" for part in parts)
    return Outcome(name, parts, seconds, "" if is_good else tail)


def _signal(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 20_000))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(line[:300] for line in lines[-_LINES:])
