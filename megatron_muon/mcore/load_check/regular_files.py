"""Opening a checkpoint's files: only regular ones, and without waiting.

Anyone who can write into a checkpoint's folder can leave a named pipe in place of a file. Opening
it would wait, perhaps for ever, until another process opens its other end.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_MODES = {
    "rb": os.O_RDONLY,
    "rb+": os.O_RDWR,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
}


class NotRegularError(OSError):
    """A pipe, a socket, a device or a folder is where a file should be."""


def open_regular(path: str | os.PathLike[str], mode: str = "rb", buffering: int = -1) -> BinaryIO:
    """``open`` of a regular file, or of a link to one.

    Args:
        mode: ``rb``, ``rb+`` or ``ab``.
        buffering: see ``open``.

    Raises:
        NotRegularError: the path is something else; nothing is read from it.
        OSError: it cannot be opened.
    """
    flags = _MODES[mode] | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        number = os.open(path, flags, 0o666)
    except OSError as error:
        # ENXIO: a pipe without a reader, or a socket; EISDIR: a folder
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise _not_regular(path) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise _not_regular(path)
        return os.fdopen(number, mode, buffering)  # type: ignore[return-value]
    except BaseException:
        os.close(number)
        raise


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The first bytes of a regular file, at most ``most``.

    Raises:
        NotRegularError, OSError: see ``open_regular``.
    """
    with open_regular(path) as file:
        return file.read(most)


def entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All entries but folders, in a folder and those below it; links to folders are not followed.

    Raises:
        OSError: a folder cannot be listed.
    """
    folders = [str(folder)]
    while folders:
        with os.scandir(folders.pop()) as listed:
            for entry in sorted(listed, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    yield entry


def irregular(folder: Path) -> Iterator[Path]:
    """Entries that are neither regular files nor folders, in a folder and those below it.

    A link to nothing is skipped: opening it raises an error anyway.

    Raises:
        OSError: a folder cannot be listed.
    """
    for entry in entries(folder):
        try:
            mode = entry.stat().st_mode
        except OSError:
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            yield Path(entry.path)


def _not_regular(path: str | os.PathLike[str]) -> NotRegularError:
    return NotRegularError(errno.EINVAL, "it is no regular file", str(path))
