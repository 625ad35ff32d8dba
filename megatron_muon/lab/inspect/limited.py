"""A child process with limits of time and memory, for files that may do anything.

A pickle of 3 kB can take time without end, one opcode can ask for 64 GB, and a key nested deeply
enough crashes Python's unpickler.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_muon.mcore.load_check.files import entries

SECONDS, MEMORY = 60, 4 << 30  # of processor time, and bytes, beyond what the files need
_RATE = 100 << 20  # bytes of files that a second of processor time reads, at least
_MOST_TEXT = 64 << 20  # bytes of a result


class LimitError(Exception):
    """The child has reached a limit, or crashed; says which."""


def limited(act: Callable[[], str], folder: Path) -> str:
    """The text that ``act`` returns in a child process.

    Args:
        act: reads files below ``folder`` and returns a text; raises nothing.
        folder: what its files take on disk is added to the limits; a sparse file has little there.

    Raises:
        LimitError: it has taken more than ``SECONDS``, ``MEMORY`` or a text of 64 MiB, or crashed.
    """
    disk = _on_disk(folder)
    heard, tell = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _be_the_child(act, disk, tell)
    os.close(tell)
    with os.fdopen(heard, "rb") as file:
        text = file.read(_MOST_TEXT + 1)
    if len(text) > _MOST_TEXT:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if len(text) > _MOST_TEXT:
        raise LimitError(f"the report of {folder} has more than {_MOST_TEXT >> 20} MiB")
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended == signal.SIGXCPU:
        raise LimitError(f"reading {folder} took more than {_seconds(disk)} s of processor time")
    if status:
        why = f"by signal {ended}" if ended else "without a report"
        raise LimitError(
            f"reading {folder} ended {why}, as a damaged or hostile file makes Python, or needed "
            f"more than {MEMORY >> 30} GiB beside its files"
        )
    return text.decode()


def _be_the_child(act: Callable[[], str], disk: int, tell: int) -> NoReturn:
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what torch's C++ may print of a file
        seconds = _seconds(disk)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        memory = _mapped() + MEMORY + disk
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        with os.fdopen(tell, "wb") as file:
            file.write(act().encode())
        code = 0
    except (MemoryError, OSError):
        pass
    finally:
        os._exit(code)


def _seconds(disk: int) -> int:
    return SECONDS + disk // _RATE


def _mapped() -> int:
    """Bytes of address space that this process has, torch's libraries above all."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 64 << 30
    return pages * resource.getpagesize()


def _on_disk(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):  # what cannot be listed cannot be read
        for entry in entries(folder):
            total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
