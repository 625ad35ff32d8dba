"""Files that a command writes at its end, checked before its work."""

from __future__ import annotations

import os
from pathlib import Path


def require_writable(flag: str, path: Path) -> None:
    """Nothing is written yet.

    Args:
        flag: the one that names the file, for errors.
        path: the file's; it may be there already.

    Raises:
        ValueError: it cannot be written there; names the flag and the path.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: give the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{flag} {path} cannot be written: give a file in a folder of yours")
