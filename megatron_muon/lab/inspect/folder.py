"""Finding the checkpoint's folder that a path means, and reading it in either format."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_muon.lab.inspect.contents import Contents
from megatron_muon.lab.inspect.torch_dist_files import read_torch_dist
from megatron_muon.lab.inspect.torch_files import files_of, read_torch
from megatron_muon.mcore.checkpoint.torch_dist import METADATA
from megatron_muon.megatron_lm import tracker

_ITERATION = re.compile(r"iter_[0-9]+|release")


class NoFolderError(ValueError):
    """The tracker file names no checkpoint that is there."""


def located(path: Path) -> tuple[Path, list[str]]:
    """The folder of the iteration that a path means, and notes on the tracker file.

    Raises:
        OSError: there is no such folder; or it has several checkpoints, and no tracker names one.
        NoFolderError: the tracker is damaged, or names a folder that is not there.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder")
    if (path / tracker.NAME).exists():
        named = _named(path)
        if not named.is_dir():
            raise NoFolderError(f"{path / tracker.NAME} names {named.name}, which is not there")
        return named, []
    names = sorted(each.name for each in path.iterdir() if _ITERATION.fullmatch(each.name))
    if names and not (path / METADATA).exists() and not files_of(path):
        raise FileNotFoundError(
            f"{path} has no {tracker.NAME}, so nothing says which of its checkpoints is meant: "
            f"give the folder of one, such as {path / names[-1]}"
        )
    above = path.absolute().parent
    try:
        other = _named(above).name if (above / tracker.NAME).exists() else path.absolute().name
    except NoFolderError:
        return path, []
    if other == path.absolute().name:
        return path, []
    return path, [f"the tracker file names {other}, not this one"]


def _named(folder: Path) -> Path:
    file = folder / tracker.NAME
    try:
        return folder / str(tracker.named_by(folder))
    except ValueError as error:
        raise NoFolderError(f"the tracker file names no iteration: {error}") from None
    except OSError as error:
        raise NoFolderError(f"{file} cannot be read: {error.strerror}") from None


def read(folder: Path) -> Contents:
    """The contents of the checkpoint of one iteration.

    Raises:
        FileNotFoundError: there is no checkpoint in it.
    """
    if (folder / METADATA).exists() or any(folder.glob("*.distcp")):
        return read_torch_dist(folder)
    if files_of(folder):
        return read_torch(folder)
    raise FileNotFoundError(f"{folder} has no checkpoint in it")
