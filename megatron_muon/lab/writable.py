"""A check, before a command's work, of the files that it writes at its end."""

from __future__ import annotations

import os
from pathlib import Path


def require_writable(flag: str, path: Path) -> None:
    """Check that a file can be written; write nothing.

    Args:
        flag: the flag that names the file, for errors.
        path: path of the file, which may exist already.

    Raises:
        ValueError: the file cannot be written; names the flag and the path.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: give the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{flag} {path} cannot be written: give a file in a folder of yours")
