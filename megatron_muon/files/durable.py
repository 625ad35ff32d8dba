"""Writing small files whole, even if the process ends at any moment."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file. If the process ends meanwhile, the file has all its text or is as before.

    Raises:
        OSError: it cannot be written.
    """
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")  # others may write path, too
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
    """Make the new name survive a loss of power; not every file system can sync a folder."""
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
