"""The lock of a checkpoint's folder: one process has it, and its end drops it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from megatron_muon.mcore.load_check import files
from megatron_muon.mcore.load_check.files import Lock

HOLDS = (
    "import fcntl, sys\n"
    "file = open(sys.argv[1], 'a')\n"
    "fcntl.lockf(file, fcntl.LOCK_EX)\n"
    "print('held', flush=True)\n"
    "sys.stdin.read()"
)


@contextmanager
def _held_by_another(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the lock until it is killed."""
    words = [sys.executable, "-c", HOLDS, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_one_process_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with _held_by_another(path) as other:
        with pytest.raises(BlockingIOError, match="it is locked"):
            Lock.take(path)
        other.kill()
        other.wait()
        lock = Lock.take(path)
    assert lock is not None
    lock.release()
    assert not path.exists()


def test_a_file_that_its_holder_removes_meanwhile_is_not_locked_in_its_place(
    tmp_path: Path,
) -> None:
    """Else the next process would make a file anew, and both would hold a lock."""
    path = tmp_path / "lock"
    lockf = files.fcntl.lockf
    calls = []

    def after_its_holder(number: int, command: int) -> None:
        calls.append(number)
        if len(calls) == 1:
            path.unlink()
        lockf(number, command)

    with mock.patch.object(files.fcntl, "lockf", after_its_holder):
        lock = Lock.take(path)
    assert lock is not None and len(calls) == 2
    assert os.path.samestat(path.stat(), os.fstat(lock.number))
    lock.release()


def test_a_file_system_without_locks_has_none_and_keeps_no_file(tmp_path: Path) -> None:
    missing = OSError(errno.ENOSYS, "Function not implemented")
    with mock.patch.object(files.fcntl, "lockf", side_effect=missing):
        assert Lock.take(tmp_path / "lock") is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_replaced_the_lock_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = Lock.take(path)
    assert lock is not None
    path.unlink()
    path.write_text("theirs")
    lock.release()
    assert path.read_text() == "theirs"
