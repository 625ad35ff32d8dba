"""Writing small files whole, even if the process ends at any moment."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


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
