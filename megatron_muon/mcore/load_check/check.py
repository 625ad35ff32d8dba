"""Checking a checkpoint against its digest, on all ranks together, before it is
read.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_muon.console import first_names, say
from megatron_muon.mcore.load_check import digest
from megatron_muon.mcore.load_check.checksum import checksum
from megatron_muon.mcore.load_check.digest import Digest, DigestError, Files
from megatron_muon.mcore.load_check.models import (
    TrainedModel,
    device_of_trained,
    digest_wanted,
)
from megatron_muon.mcore.load_check.same_model import (
    parameters_in_digest,
    require_same_model,
)
from megatron_muon.runtime.collectives import all_gather_numbers
from megatron_muon.runtime.consensus import together
from megatron_muon.runtime.patches import replaced

THREADS = 4  # threads that hash a rank's files; a rank seldom writes more than two

_checked: str | None = None  # the folder that the load in progress has been checked for


def checked(folder: str) -> AbstractContextManager[None]:
    """A context of a load that has checked this folder."""
    return replaced(sys.modules[__name__], _checked=folder)


def is_checked(folder: str) -> bool:
    """Whether the load in progress has checked this folder."""
    return _checked is not None and Path(folder) == Path(_checked)


def check(trained: TrainedModel | None, checkpoint_dir: str, exact: bool) -> bool:
    """Refuse a checkpoint that is not complete, not intact, or of a different model.

    Every rank of the world calls it. Without a digest rank 0 prints a line. ``exact``:
    the optimizer's state is loaded, too, so the checkpoint may have no parameter that
    the model lacks.

    Returns:
        Whether the files were compared with a digest.

    Raises:
        DigestError: on the ranks that find a fault; a RuntimeError on the others.
        NotImplementedError: the folder is in an object store.
    """
    if not digest_wanted(trained):
        return False
    device = device_of_trained(trained)
    saved = check_files(local_folder(checkpoint_dir), device)
    if saved is None:
        return False
    own = parameters_in_digest(trained)
    together(
        lambda: require_same_model(saved, own, checkpoint_dir, exact), None, device
    )
    return True


def local_folder(checkpoint_dir: str) -> Path:
    """A checkpoint's folder; NotImplementedError for an object store."""
    if "://" in checkpoint_dir:
        raise NotImplementedError(
            f"{checkpoint_dir} is in an object store, where megatron_muon makes and "
            "checks no digest: give --no-muon-checkpoint-digest "
            "(checkpoint_digest=False in MuonConfig)"
        )
    return Path(checkpoint_dir)


def check_files(folder: Path, device: torch.device) -> Digest | None:
    """Refuse a checkpoint that is not complete or not intact; returns its digest, if it
    has one.

    Every rank of the world calls it. Without a digest rank 0 prints a line.
    """
    saved = together(lambda: digest.complete(folder), None, device)
    number = int(saved["hash"][:15], 16) if saved else 0
    numbers = all_gather_numbers([number], None, device)
    if numbers.count(numbers[0]) < len(numbers):
        raise DigestError(
            f"ranks see different files at {folder / digest.FILE_NAME}: a checkpoint "
            "must be on a file system that all of them share"
        )
    if saved is None:
        if dist.get_rank() == 0 and folder.is_dir():
            say(
                f"[megatron_muon] {folder} was saved without a digest "
                f"({digest.FILE_NAME}), so its files are not checked"
            )
        return None
    together(lambda: _require_undamaged(folder, saved["files"]), None, device)
    return saved


def _require_undamaged(folder: Path, files: Files) -> None:
    """Hash this rank's share of the files; DigestError if one is not as it was
    written.
    """
    by_size = sorted(files, key=lambda name: (-files[name]["size"], name))
    mine = by_size[dist.get_rank() :: dist.get_world_size()]
    with ThreadPoolExecutor(THREADS) as pool:
        faults = pool.map(
            lambda name: digest.fault(folder, name, files[name], checksum), mine
        )
        found = zip(mine, faults, strict=True)
        bad = {name: fault for name, fault in sorted(found) if fault}
    if bad:
        first, *others = bad
        also = f" So are {first_names(others)}." if others else ""
        raise DigestError(f"{bad[first]}.{also} {digest.way_out(folder)}")
