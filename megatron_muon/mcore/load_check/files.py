"""A checkpoint's files: only regular ones are read, and small ones are written whole.

Opening a named pipe can wait for ever, and a process can end at any moment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class NotRegularError(OSError):
    """A pipe, a socket, a device or a folder is where a file should be."""


def open_regular(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """``open`` for reading, of a regular file or of a link to one.

    Raises:
        NotRegularError: the path is something else; nothing is read from it.
        OSError: it cannot be opened.
    """
    not_regular = NotRegularError(errno.EINVAL, "it is no regular file", str(path))
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise not_regular if error.errno == errno.ENXIO else error from None  # a socket
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise not_regular
        return os.fdopen(number, "rb", buffering)
    except BaseException:
        os.close(number)
        raise


def entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All entries but folders, in a folder and those below it, but not behind links."""
    folders = [str(folder)]
    while folders:
        with os.scandir(folders.pop()) as listed:
            for entry in sorted(listed, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    yield entry


def write_text(path: Path, text: str) -> None:
    """Write a file; if the process ends meanwhile, the file is whole or as before.

    A link at ``path`` is replaced; what it points to stays.

    Raises:
        OSError: it cannot be written.
    """
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")  # others may write path, too
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
