"""Finding the checkpoint's folder that a path means, and reading it in either format."""

from __future__ import annotations

from pathlib import Path

from megatron_muon.lab.inspect.contents import Contents
from megatron_muon.lab.inspect.torch_dist_files import read_torch_dist
from megatron_muon.lab.inspect.torch_files import files_of, read_torch
from megatron_muon.mcore.checkpoint.torch_dist import METADATA
from megatron_muon.megatron_lm import tracker


class NoFolderError(ValueError):
    """The tracker file names no checkpoint that is there."""


def located(path: Path) -> Path:
    """The folder of the iteration that a path means: the tracker file's, or the path itself.

    Raises:
        OSError: there is no such folder.
        NoFolderError: the tracker is damaged, or names a folder that is not there.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder")
    file = path / tracker.NAME
    if not file.exists():
        return path
    try:
        named = path / str(tracker.named_by(path))
    except ValueError as error:
        raise NoFolderError(f"the tracker file names no iteration: {error}") from None
    except OSError as error:
        raise NoFolderError(f"{file} cannot be read: {error.strerror}") from None
    if not named.is_dir():
        raise NoFolderError(f"{file} names {named.name}, which is not there")
    return named


def read(folder: Path) -> Contents:
    """The contents of the checkpoint of one iteration.

    Raises:
        FileNotFoundError: there is no checkpoint in it.
    """
    if (folder / METADATA).exists() or any(folder.glob("*.distcp")):
        return read_torch_dist(folder)
    if files_of(folder):
        return read_torch(folder)
    raise FileNotFoundError(
        f"{folder} has no checkpoint in it, and no {tracker.NAME}: give the folder of one iteration"
    )
