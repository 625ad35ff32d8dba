"""A disk that is full and a folder that may only be read: an error everywhere, and
nothing lost.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_muon.mcore.checkpoint import manifest
from support.checkpoints.saving import formats
from support.checkpoints.sealing import loaded, save
from support.models.gpt import Case, stepped
from support.ranks import error_of, run
from support.runs.topologies import TP2

FORMATS = formats()
CASE = Case(steps=1)
ROOM = 20_000  # bytes of a file; each rank's part of the state has more
NOBODY = 65534
# torch's writer of archives says the second, of a write that came short
FULL = ("File too large", "unexpected pos")


@contextmanager
def full_disk() -> Iterator[None]:
    """Within it a write past ``ROOM`` bytes of a file fails, as one to a full disk
    does. A write that fails for want of blocks says ENOSPC; this one says EFBIG.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def without_rights() -> Iterator[None]:
    """Within it root is nobody, whom the modes of folders hold."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that others than root may enter, as pytest's own are not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    for inside in (path, *path.rglob("*")):
        if inside.is_dir():
            inside.chmod(0o755)
    shutil.rmtree(path)


def _saved_twice(
    format: str, first: str, second: str, failing: int, fault: Callable[[], Any]
) -> str:
    """A save that succeeds, and the error of one in which rank ``failing`` has the
    fault; -1: all ranks have it.
    """
    built = stepped(CASE, TP2, 1)
    save(built, first, format)
    here = failing in (-1, dist.get_rank())
    with fault() if here else nullcontext():
        return error_of(lambda: save(built, second, format))


def _first_loads(format: str, folder: Path) -> dict[str, Any]:
    return loaded(CASE, TP2, format, folder)


# fully_reshardable gathers the state on rank 0, so that rank 1 writes little
@pytest.mark.parametrize(
    ("format", "failing"),
    [(FORMATS[0], 0), (FORMATS[0], 1), (FORMATS[1], 0), ("torch", 1)],
)
def test_a_disk_that_is_full_on_one_rank(
    format: str, failing: int, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    errors = run(_saved_twice, 2, format, first, second, failing, full_disk)
    assert "no error" not in errors
    assert any(said in error for said in FULL for error in errors), errors
    said = manifest.read(second)
    assert said is None or not said["complete"]
    assert [one["error"] for one in run(_first_loads, 2, format, first)] == [None, None]
    refused = [one["error"] for one in run(_first_loads, 2, format, second)]
    assert all(refused), refused


@pytest.mark.parametrize("format", [FORMATS[0], "torch"])
def test_a_folder_that_may_only_be_read(format: str, folder: Path) -> None:
    first, second = folder / "first", folder / "second"
    second.mkdir(0o555)
    errors = run(_saved_twice, 2, format, first, second, -1, without_rights)
    assert all("Permission denied" in error for error in errors), errors
    assert list(second.iterdir()) == []
    assert [one["error"] for one in run(_first_loads, 2, format, first)] == [None, None]
