"""A save's claim on a folder: its name in the folder, and a lock that it holds meanwhile.

All ranks of a job share one lock, an flock of a file in the folder. The kernel releases it when the
last of their processes ends, also if it is killed. Where a file system has no locks, or none across
machines, the marks of ``digest`` still show another save.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from megatron_muon.files.regular import open_regular, read_regular

LOCK_NAME = "megatron_muon.lock"
WAIT = 10.0  # seconds that a save waits for another to end, such as that of a job being killed
_PAUSE = 0.1  # seconds between two tries
# Environment variables that identify a job.
_JOB = (
    *("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID", "JOB_ID"),
    *("KUBERNETES_POD_NAME", "POD_NAME", "TORCHELASTIC_RUN_ID"),
)
_MOST = 1 << 16  # bytes read of the lock's file, at most
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}

Save = dict[str, Any]


class HeldError(RuntimeError):
    """Another save holds the lock."""


def identity() -> Save:
    """A new save by this process: ``id``, random; ``host``, ``pid``, ``job`` and ``began``, UTC."""
    return {
        "id": secrets.token_hex(8),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": {name: os.environ[name] for name in _JOB if os.environ.get(name)},
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


def described(save: Mapping[str, Any] | None) -> str:
    """A save in words.

    Args:
        save: its ``identity``; None where a mark has none.
    """
    if save is None:
        return "a run that left no name"
    job = "".join(f", {name} {value}" for name, value in save["job"].items())
    return f"process {save['pid']} on {save['host']}{job}, which began at {save['began']} UTC"


def is_save(value: Any) -> bool:
    """Whether a value that was read has the form of ``identity``."""
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(key), str) for key in ("id", "host", "began"))
        and re.fullmatch("[0-9a-f]{16}", value["id"]) is not None  # files are named by it
        and isinstance(value.get("pid"), int)
        and isinstance(value.get("job"), dict)
    )


def take(folder: Path, save: Save | None, wait: float | None = None) -> BinaryIO | None:
    """Lock a folder against all other jobs; for the one process that begins a save.

    Args:
        folder: a folder that exists.
        save: written into the lock's file for ``holder``; None leaves the file as it is.
        wait: seconds to wait for others to end; None for ``WAIT``.

    Returns:
        The lock; None where the file system has none.

    Raises:
        HeldError: another save is going on.
        OSError: the lock's file cannot be opened.
    """
    end = time.monotonic() + (WAIT if wait is None else wait)
    while True:
        file = open_regular(folder / LOCK_NAME, "ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, folder / LOCK_NAME):
                _leave(file, save)
                return file
            file.close()  # a save that ended meanwhile has removed the file
        except BlockingIOError:
            file.close()
            if time.monotonic() >= end:
                raise HeldError(f"{folder} is locked by another save") from None
            time.sleep(_PAUSE)
        except OSError as error:
            file.close()
            if error.errno in _NO_LOCKS:
                return None
            raise


def share(lock: BinaryIO | None) -> None:
    """Make the lock shared, so that the other ranks of the job can ``join``.

    Raises:
        HeldError: another job has taken the lock in between.
    """
    if lock is None:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HeldError(f"{lock.name} was taken by another save") from None


def join(folder: Path) -> BinaryIO | None:
    """Hold the lock, too; for the other ranks of the job, after the first called ``share``.

    Returns:
        The lock; None where the file system has none, or this machine does not see its file yet.

    Raises:
        HeldError: another job has the lock.
    """
    try:
        file = open_regular(folder / LOCK_NAME, "rb+")
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise HeldError(f"{folder} is locked by another save") from None
    except OSError:
        file.close()
        return None
    return file


def release(lock: BinaryIO | None) -> None:
    """Release a lock, also for processes that were forked while it was held."""
    if lock is None or lock.closed:
        return
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    lock.close()


def is_held(folder: Path) -> bool:
    """Whether a save into a folder is going on, as far as locks tell.

    Raises:
        OSError: the lock's file is there and cannot be opened.
    """
    if not (folder / LOCK_NAME).exists():
        return False
    try:
        release(take(folder, None, 0.0))
    except HeldError:
        return True
    return False


def holder(folder: Path) -> Save | None:
    """The save that the lock's file names. It waits up to 1 s for a holder that just took it."""
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        save = read(folder / LOCK_NAME)
        if save is not None:
            return save
        time.sleep(_PAUSE)
    return None


def read(path: Path) -> Save | None:
    """The save that a file names; None where the file names none or is missing."""
    try:
        save = json.loads(read_regular(path, _MOST))
    except (OSError, ValueError, RecursionError):
        return None
    return dict(save) if is_save(save) else None


def _leave(file: BinaryIO, save: Save | None) -> None:
    if save is not None:
        file.truncate(0)
        file.write(json.dumps(save).encode())
        file.flush()


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(file.fileno())
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
