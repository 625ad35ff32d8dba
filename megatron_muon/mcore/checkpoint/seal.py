"""Saves end with a manifest, and loads begin with a check against it.

``save`` and ``load`` wrap those of ``megatron.core.dist_checkpointing`` for all
callers. They act in a process that has built a model for Muon. ``saving`` does the same
around a save in Megatron-LM's old format, which only ``torch.save`` writes.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_muon.console import first_names, say
from megatron_muon.mcore.checkpoint import manifest
from megatron_muon.mcore.checkpoint.absent import drop_absent, explained
from megatron_muon.mcore.checkpoint.buffers import RECORD
from megatron_muon.mcore.checkpoint.manifest import DigestError, Manifest
from megatron_muon.mcore.checkpoint.matrices import Record, require_same_matrices
from megatron_muon.mcore.host.shards import device_of
from megatron_muon.runtime.collectives import all_gather_json, all_gather_numbers
from megatron_muon.runtime.consensus import together
from megatron_muon.runtime.patches import replaced
from megatron_muon.settings.config import MuonConfig
from megatron_muon.version import __version__

T = TypeVar("T")
_THREADS = 4  # that hash a rank's files; a rank seldom writes more than two
_INTEGRITY = "integrity.json"  # Megatron's hashes, among them the manifest's
# torch_dist: the rank that wrote it, and a number
_SHARD = re.compile(r"__\d+_\d+\.distcp$")

# Whether this process's saves end with a manifest and its loads are checked; None while
# it has built no model for Muon. The same on all ranks.
_wanted: bool | None = None
_checked: str | None = None  # the folder that the load in progress has been checked for


def seal_from_now_on(config: MuonConfig | None = None) -> None:
    """Have saves end and loads begin as the settings say; as in a new process without
    them. Every rank of the world calls it.
    """
    global _wanted
    _wanted = None if config is None else config.checkpoint_digest


# --- saving ---------------------------------------------------------------------------


def save(
    original: Callable[..., Any],
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's save, and the manifest. Every rank of the world calls it."""
    finish = _begun(str(checkpoint_dir), record_in(sharded_state_dict))
    if finish is None:
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    # since core 0.19; the manifest comes first
    if kwargs.pop("verify_integrity", False):
        finish = partial(finish, has_integrity=True)
    with _quiet_about_the_mark(Path(checkpoint_dir)):
        request = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    if request is None:
        finish()
    else:  # Megatron's metadata come before the manifest, its tracker after
        request.finalize_fns.append(finish)
    return request


@contextmanager
def saving(record: Record | None, folder: Path) -> Iterator[None]:
    """Mark a folder before a save by ``torch.save``, and write its manifest after it.

    All ranks of the world enter and exit it together.
    """
    finish = _begun(str(folder), record)
    yield
    if finish is not None:
        finish()


def record_in(state: Any) -> Record | None:
    """The record of Muon's optimizer in a state dict, if it has one on this rank."""
    if isinstance(state, Mapping):
        if RECORD in state:  # in torch_dist a ShardedObject of Megatron's
            return getattr(state[RECORD], "data", state[RECORD])
        state = state.values()
    elif not isinstance(state, (list, tuple)):
        return None
    return next(filter(None, map(record_in, state)), None)


def _begun(checkpoint_dir: str, record: Record | None) -> Callable[..., None] | None:
    """Mark the folder of a save; returns what finishes it.

    None where it gets no manifest. An earlier one, which does not fit what is written
    then, is removed.
    """
    if _wanted is None:
        return None
    if not _wanted:
        stale = Path(checkpoint_dir) / manifest.FILE_NAME
        _on_rank_0(lambda: stale.unlink(missing_ok=True))
        return None
    folder = _local(checkpoint_dir)
    mark = _on_rank_0(lambda: manifest.begin(folder))
    return partial(_finish, folder, mark, record)


def _finish(
    folder: Path,
    mark: str | None,
    record: Record | None,
    *,
    has_integrity: bool = False,
) -> None:
    """Hash the files and mark the folder as complete. Every rank of the world calls it.

    ``mark`` and ``record`` are rank 0's.
    ``has_integrity``: Megatron's own hashes come after it (``--verify-integrity``).
    """
    device = device_of([])
    together(lambda: None, None, device)  # every rank's files are there
    hashed = together(lambda: _hashed(folder), None, device)
    files: dict[str, Any] = {}
    for theirs in all_gather_json(hashed, None):
        files |= theirs
    wrote = {
        "megatron_muon": __version__,
        "megatron_core": str(importlib.import_module("megatron.core").__version__),
        "torch": str(torch.__version__),
        "world_size": dist.get_world_size(),
    }
    content = {"wrote": wrote, "record": record, "files": files}
    _on_rank_0(lambda: manifest.finish(folder, str(mark), content))
    if has_integrity:
        own = importlib.import_module("megatron.core.dist_checkpointing.validation")
        _on_rank_0(lambda: own.save_integrity_manifest(str(folder)))


def _hashed(folder: Path) -> dict[str, Any]:
    """The sizes and hashes of the shards of torch_dist that this rank has written; on
    rank 0 also those of all files that are no shards.
    """
    rank = dist.get_rank()
    paths = list(folder.glob(f"__{rank}_*.distcp"))
    for path in folder.rglob("*") if rank == 0 else ():
        is_later = manifest.is_own(path.name) or path.name == _INTEGRITY
        if path.is_file() and not (is_later or _SHARD.search(path.name)):
            paths.append(path)
    # by torch's CRC-32s if it computed them (2.6 can be told not to)
    summed = getattr(torch.serialization, "get_crc32_options", lambda: True)()

    def entry(path: Path) -> dict[str, Any]:
        size = path.stat().st_size
        return {"size": size, "hash": manifest.file_hash(path, written=summed)}

    names = [str(path.relative_to(folder)) for path in paths]
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(entry, paths), strict=True))


@contextmanager
def _quiet_about_the_mark(folder: Path) -> Iterator[None]:
    """Silence Megatron's warning of files in the folder if the mark is the only one."""
    logger = logging.getLogger("megatron.core.dist_checkpointing.serialization")
    others = folder.is_dir() and any(
        not manifest.is_own(path.name) for path in folder.iterdir()
    )

    def passes(record: logging.LogRecord) -> bool:
        return others or "Overwriting old incomplete" not in record.getMessage()

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


# --- loading --------------------------------------------------------------------------


def load(
    original: Callable[..., Any],
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's load, after ``check``; an error about Muon's state names the way
    out.
    """
    if _wanted is None:
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    folder = str(checkpoint_dir)
    if _checked is None or Path(folder) != Path(_checked):
        check(folder, record_in(sharded_state_dict))
    drop_absent(sharded_state_dict, folder)
    with explained(folder):
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)


def checked(folder: str) -> AbstractContextManager[None]:
    """A context of a load that has checked this folder."""
    return replaced(sys.modules[__name__], _checked=folder)


def check(checkpoint_dir: str, own: Record | None) -> bool:
    """Refuse a checkpoint that is not complete, not intact, or of a different model.

    Every rank of the world calls it. Without a manifest rank 0 prints a line. ``own``:
    the record of the optimizer whose state is to be loaded, if any is on this rank.

    Returns:
        Whether the files were compared with a manifest.

    Raises:
        DigestError: on the ranks that find a fault; a RuntimeError on the others.
        NotImplementedError: the folder is in an object store.
    """
    if not _wanted:
        return False
    folder = _local(checkpoint_dir)
    saved = check_files(folder)
    if saved is None:
        return False

    def compare() -> None:
        if own is not None and saved["record"] is not None:
            require_same_matrices(saved["record"], own, str(folder))

    together(compare, None, device_of([]))
    return True


def check_files(folder: Path) -> Manifest | None:
    """Refuse a checkpoint that is not complete or not intact; returns its manifest, if
    it has one.

    Every rank of the world calls it. Without a manifest rank 0 prints a line.
    """
    device = device_of([])
    saved = together(lambda: manifest.complete(folder), None, device)
    number = int(saved["hash"][:15], 16) if saved else 0
    numbers = all_gather_numbers([number], None, device)
    if numbers.count(numbers[0]) < len(numbers):
        raise DigestError(
            f"ranks see different files at {folder / manifest.FILE_NAME}: a checkpoint "
            "must be on a file system that all of them share"
        )
    if saved is None:
        if dist.get_rank() == 0 and folder.is_dir():
            say(
                f"[megatron_muon] {folder} was saved without a digest "
                f"({manifest.FILE_NAME}), so its files are not checked"
            )
        return None
    together(lambda: _require_undamaged(folder, saved["files"]), None, device)
    return saved


def _require_undamaged(folder: Path, files: Mapping[str, Any]) -> None:
    """Hash this rank's share of the files; DigestError if one is not as it was
    written.
    """
    by_size = sorted(files, key=lambda name: (-files[name]["size"], name))
    mine = by_size[dist.get_rank() :: dist.get_world_size()]
    with ThreadPoolExecutor(_THREADS) as pool:
        faults = pool.map(
            lambda name: manifest.fault(folder, name, files[name], hashes=True), mine
        )
        found = zip(mine, faults, strict=True)
        bad = {name: fault for name, fault in sorted(found) if fault}
    if bad:
        first, *others = bad
        also = f" So are {first_names(others)}." if others else ""
        raise DigestError(f"{bad[first]}.{also} {manifest.way_out(folder)}")


def _local(checkpoint_dir: str) -> Path:
    """A checkpoint's folder; NotImplementedError for an object store."""
    if "://" in checkpoint_dir:
        raise NotImplementedError(
            f"{checkpoint_dir} is in an object store, where megatron_muon makes and "
            "checks no digest: give --no-muon-checkpoint-digest "
            "(checkpoint_digest=False in MuonConfig)"
        )
    return Path(checkpoint_dir)


def _on_rank_0(act: Callable[[], T]) -> T | None:
    """What ``act`` returns on rank 0; an error there stops all ranks."""
    return together(
        lambda: act() if dist.get_rank() == 0 else None, None, device_of([])
    )
