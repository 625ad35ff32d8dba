"""Files: only regular ones are read, and small ones are written whole.

Opening a named pipe can wait for ever, and a process can end at any moment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """``open`` for reading, of a regular file or of a link to one; OSError for any
    other.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(number, "rb")


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
