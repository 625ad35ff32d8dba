"""Writing small files so that a process may end at any moment."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there with all its text or as it was before, whenever it ends.

    Raises:
        OSError: it cannot be written.
    """
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")  # others may write it, too
    try:
        with beside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """So that the new name outlasts a loss of power; not every file system lets a folder."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(number)
    except OSError:
        pass
    finally:
        os.close(number)
