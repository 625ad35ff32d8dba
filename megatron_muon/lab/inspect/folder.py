"""Finding the checkpoint's folder that a path means, and reading it in either format."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path

from megatron_muon.lab.inspect.tensors import Contents
from megatron_muon.lab.inspect.torch_dist_files import read_torch_dist
from megatron_muon.lab.inspect.torch_files import files_of, read_torch
from megatron_muon.mcore.checkpoint.torch_dist import METADATA
from megatron_muon.megatron_lm import tracker

_ITERATION = re.compile(r"iter_[0-9]+|release")


@dataclass(frozen=True, slots=True)
class Located:
    """The place of a checkpoint.

    Attributes:
        folder: the folder of one iteration; the tracker file instead, where it names no folder.
        is_there: whether ``folder`` exists and is a folder.
        faults, notes: sentences about the tracker file.
    """

    folder: Path
    is_there: bool = True
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def located(path: Path) -> Located:
    """The folder of the iteration that a path means.

    Args:
        path: the folder of ``--save``, or one iteration's folder.

    Raises:
        OSError: there is no such folder; or it has several checkpoints, and no tracker names one.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder")
    file = path / tracker.NAME
    if file.exists():
        named, why = _named(file)
        if named is None:
            return Located(file, False, (why,))
        if not named.is_dir():
            return Located(named, False, (f"{file} names {named.name}, which is not there",))
        return Located(named)
    _refuse_several(path)
    file = path.absolute().parent / tracker.NAME
    named = _named(file)[0] if file.exists() else None
    if named is None or named.name == path.absolute().name:
        return Located(path)
    return Located(path, notes=(f"the tracker file names {named.name}, not this one",))


def _named(file: Path) -> tuple[Path | None, str]:
    """The folder that a tracker file names; or None, and the file's fault in words."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # reading a pipe would wait
            return None, f"{file} is no regular file"
        name = tracker.named_by(file.parent)
    except ValueError as error:
        return None, f"the tracker file names no iteration: {error}"
    except OSError as error:
        return None, f"{file} cannot be read: {error.strerror}"
    return None if name is None else file.parent / name, f"{file} is gone"


def _refuse_several(path: Path) -> None:
    names = sorted(each.name for each in path.iterdir() if _ITERATION.fullmatch(each.name))
    if names and not (path / METADATA).exists() and not files_of(path):
        raise FileNotFoundError(
            f"{path} has no {tracker.NAME}, so nothing says which of its checkpoints is meant: "
            f"give the folder of one, such as {path / names[-1]}"
        )


def read(folder: Path) -> Contents:
    """The contents of a checkpoint.

    Args:
        folder: the folder of one iteration.

    Raises:
        FileNotFoundError: there is no checkpoint in it.
    """
    if (folder / METADATA).exists() or any(folder.glob("*.distcp")):
        return read_torch_dist(folder)
    if files_of(folder):
        return read_torch(folder)
    raise FileNotFoundError(f"{folder} has no checkpoint in it")
