"""Checking a checkpoint against its digest, on all ranks together, before it is read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.console import printable, say
from megatron_muon.mcore.checkpoint.torch_dist import read_metadata
from megatron_muon.mcore.load_check import digest
from megatron_muon.mcore.load_check.checksum import checksum
from megatron_muon.mcore.load_check.digest import Digest, DigestError
from megatron_muon.mcore.load_check.model_settings import SETTINGS_WAY_OUT, changed_settings
from megatron_muon.mcore.load_check.model_table import changed_splits, check_model
from megatron_muon.mcore.load_check.models import (
    Wanted,
    Whole,
    local_folder,
    trained_device,
    vocabulary,
    wanted_by_all,
    whole_model,
)
from megatron_muon.mcore.load_check.regular_files import irregular
from megatron_muon.mcore.wiring.trained import TrainedModel
from megatron_muon.runtime.collectives import all_gather_numbers
from megatron_muon.runtime.consensus import together

THREADS = 4  # threads that hash a rank's files; a rank seldom writes more than two
SHARD = re.compile(r"__(\d+)_\d+\.distcp$")  # torch_dist: the rank that wrote it, then its number

_checked: str | None = None  # the folder that the load in progress has been checked for


@contextmanager
def checked(folder: str) -> Iterator[None]:
    """Note that the load in progress has checked this folder."""
    global _checked
    before, _checked = _checked, folder
    try:
        yield
    finally:
        _checked = before


def is_checked(folder: str) -> bool:
    """Whether the load in progress has checked this folder."""
    return folder == _checked


def check(find: Callable[[], TrainedModel | None], checkpoint_dir: str, exact: bool) -> None:
    """Refuse a checkpoint that is not complete, not intact, or of another model.

    Every rank of the world calls it. Without a digest there is one warning, on rank 0.

    Args:
        find: returns the model that is to be loaded, if Muon trains it.
        checkpoint_dir: the checkpoint's folder.
        exact: the optimizer's state is loaded, too. So the checkpoint may have no parameter that
            the model lacks, and the model must compute the same function.

    Raises:
        DigestError: on the ranks that find a fault.
        NotImplementedError: the folder is in an object store.
        RuntimeError: only another rank has an error.
    """
    trained, wanted = wanted_by_all(find)
    if wanted != Wanted.DIGEST:
        return
    folder, device = local_folder(checkpoint_dir, wanted), trained_device(trained)
    saved = check_files(folder, device)
    if saved is None:
        return
    own = whole_model(trained)
    together(lambda: _check_model(saved, own, str(folder), exact), None, device)


def _check_model(saved: Digest, own: Whole, folder: str, exact: bool) -> None:
    vocabularies = (saved["vocabulary"], vocabulary())
    check_model(saved["parameters"], own.table, folder, exact, vocabularies)
    if exact and dist.get_rank() == 0:
        _tell_of_splits(changed_splits(saved["parameters"], own.table), folder)
    changed = changed_settings(saved["model"], own.settings)
    if not changed:
        return
    told = f"{folder} is of a model that computes another function: {'; '.join(changed)}"
    if exact:
        raise DigestError(f"{told}. {SETTINGS_WAY_OUT}")
    if dist.get_rank() == 0:
        line = printable(f"WARNING: {told}. Its weights are loaded into this one")
        say(f"[megatron_muon] {line}")


def _tell_of_splits(changes: list[str], folder: str) -> None:
    """Momentum is the same under every split, so nothing is converted; the next step differs."""
    if changes:
        line = printable(
            f"{folder} was trained with other matrices (--muon-split): {'; '.join(changes)}. "
            "Momentum goes on as it is"
        )
        say(f"[megatron_muon] {line}")


def check_files(folder: Path, device: torch.device) -> Digest | None:
    """Refuse a checkpoint that is not complete or not intact; returns its digest, if it has one.

    Every rank of the world calls it. Without a digest there is one warning, on rank 0.

    Args:
        folder: the checkpoint's folder.
        device: device of the tensors that the world communicates.

    Raises:
        DigestError: on the ranks that find a fault.
        RuntimeError: only another rank has an error.
    """
    saved = together(lambda: _complete(folder), None, device)
    together(lambda: _require_regular(folder) if dist.get_rank() == 0 else None, None, device)
    if not _all_have(saved, folder, device):
        return None
    assert saved is not None
    together(lambda: _require_undamaged(folder, saved), None, device)
    return saved


def _complete(folder: Path) -> Digest | None:
    saved = digest.read(folder)
    if saved is not None:
        digest.require_complete(folder, saved)
    return saved


def _require_regular(folder: Path) -> None:
    """Refuse pipes and the like: Megatron and torch open files by name, and would hang at a pipe.

    Raises:
        DigestError: names a file that is not regular.
    """
    if not folder.is_dir():
        return  # Megatron raises the error
    bad = next(irregular(folder), None)
    if bad is not None:
        raise DigestError(
            f"{bad} is no regular file, but a pipe, a socket or a device, which no save writes: "
            f"remove it. {digest.way_out(folder)}"
        )


def _all_have(saved: Digest | None, folder: Path, device: torch.device) -> bool:
    """Whether there is a digest; all ranks must see the same one, on a shared file system."""
    numbers = [0] if saved is None else [int(saved["hash"][:15], 16)]
    every = all_gather_numbers(numbers, None, device)
    if any(other != every[0] for other in every):
        raise DigestError(
            f"ranks see different files at {folder / digest.FILE_NAME}: a checkpoint must be on a "
            "file system that all of them share"
        )
    if saved is None and dist.get_rank() == 0:
        say(
            f"[megatron_muon] WARNING: {folder} has no {digest.FILE_NAME}, so it is loaded "
            "unchecked: its files may be incomplete or damaged"
        )
    return saved is not None


def _require_undamaged(folder: Path, saved: Digest) -> None:
    """Hash this rank's share of the files.

    Raises:
        DigestError: a file is not as it was written.
    """
    files = saved["files"]
    sizes = {name: entry["size"] for name, entry in files.items()}
    mine = digest.shared_out(sizes, dist.get_world_size())[dist.get_rank()]
    with ThreadPoolExecutor(THREADS) as pool:
        faults = list(
            pool.map(lambda name: digest.fault(folder, name, files[name], checksum), mine)
        )
    bad = {name: fault for name, fault in zip(mine, faults, strict=True) if fault}
    if not bad:
        return
    name = min(bad)
    also = f" So are {digest.first_names(set(bad) - {name})}." if len(bad) > 1 else ""
    held = held_in(folder, name, files[name])
    holds = f" It holds {held}." if held else ""
    raise DigestError(f"{bad[name]}.{holds}{also} {digest.way_out(folder)}")


def held_in(folder: Path, name: str, entry: Mapping[str, Any]) -> str:
    """Names of some parameters in a file, in words; "" if unknown."""
    if entry.get("holds"):
        return ", ".join(entry["holds"])
    if os.path.basename(name) == ".metadata":
        return "the places of all parameters"
    if not SHARD.search(name):
        return ""
    try:
        places = read_metadata(folder).places
        held = {key for (key, _), place in places.items() if place.file == name}
        weights = {key for key in held if not key.startswith("optimizer.")}
        return digest.first_names(
            {key for key in weights if "_extra_state" not in key} or weights or held
        )
    except Exception:  # .metadata may be damaged, too; the error about the file matters more
        return ""
