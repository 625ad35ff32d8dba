"""A checkpoint's files: only regular ones are read, small ones are written whole, one
is locked.

Opening a named pipe can wait for ever, and a process can end at any moment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """``open`` for reading, of a regular file or of a link to one; OSError for any
    other.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(number, "rb", buffering)


def write_text(path: Path, text: str) -> None:
    """Write a file; if the process ends meanwhile, the file is whole or as before.

    A link at ``path`` is replaced; what it points to stays.

    Raises:
        OSError: it cannot be written.
    """
    # others may write path, too
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    with contextlib.suppress(OSError):  # not every file system can sync a folder
        number = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(number)  # the new name survives a loss of power
        finally:
            os.close(number)


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock on a file that this process has made for it.

    It is a POSIX record lock: the system drops it when the process ends, however that
    ends. A file without a lock, as a killed process leaves it, hinders nobody.
    """

    path: Path
    number: int  # of the open file

    @classmethod
    def take(cls, path: Path) -> Lock | None:
        """The lock; None on a file system without locks.

        Raises:
            BlockingIOError: another process holds it.
            OSError: the file cannot be made.
        """
        while True:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            lock = cls(path, number)
            try:
                fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):  # another holds it
                    os.close(number)
                    raise BlockingIOError(
                        errno.EAGAIN, "it is locked", str(path)
                    ) from error
                lock.release()
                return None
            if lock._is_in_place():
                return lock
            os.close(number)  # its holder has removed the file meanwhile

    def release(self) -> None:
        """Remove the file and drop the lock."""
        with contextlib.suppress(OSError):
            if self._is_in_place():
                self.path.unlink()
        os.close(self.number)

    def _is_in_place(self) -> bool:
        """Whether the locked file is the one that others find at the path."""
        try:
            there = self.path.lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self.number))
