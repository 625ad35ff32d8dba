"""Saves end with a manifest, and loads begin with a check against it.

``save`` and ``load`` wrap those of ``megatron.core.dist_checkpointing`` for all
callers. They act in a process that has built a model for Muon. ``sealed`` does the same
around a save in Megatron-LM's old format, which only ``torch.save`` writes.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.console import first_names, say
from megatron_muon.mcore.checkpoint import manifest
from megatron_muon.mcore.checkpoint.absent import drop_absent, explained
from megatron_muon.mcore.checkpoint.buffers import RECORD
from megatron_muon.mcore.checkpoint.manifest import DigestError, Manifest
from megatron_muon.mcore.checkpoint.matrices import Record, require_same_matrices
from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.runtime.collectives import all_gather_json
from megatron_muon.runtime.consensus import by_rank_0, gathered, together
from megatron_muon.runtime.patches import replaced
from megatron_muon.settings.config import MuonConfig
from megatron_muon.version import __version__

_THREADS = 4  # that hash a rank's share of the files
_INTEGRITY = "integrity.json"  # Megatron's hashes, among them the manifest's
# torch_dist: the rank that wrote it, and a number
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")

# Whether this process's saves end with a manifest and its loads are checked; None while
# it has built no model for Muon. The same on all ranks.
_wanted: bool | None = None
_checked: Path | None = None  # the folder that the next load has been checked for


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
    # since core 0.19; the manifest comes first
    has_integrity = bool(_wanted) and kwargs.pop("verify_integrity", False)
    write = partial(original, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    record = record_in(sharded_state_dict)
    return sealed(write, str(checkpoint_dir), record, has_integrity=has_integrity)


def sealed(
    write: Callable[[], Any],
    folder: str,
    record: Record | None,
    *,
    has_integrity: bool = False,
) -> Any:
    """Mark a folder, ``write`` a checkpoint into it, and write its manifest once all of
    it is there; the result of ``write``, which is Megatron's request of a save in the
    background, or None.

    Without a manifest an earlier one, which does not fit what is written then, is
    removed. Every rank of the world calls it. ``record`` is rank 0's.

    Args:
        has_integrity: Megatron's own hashes are to come after the manifest
            (``--verify-integrity``).
    """
    if not _wanted:
        if _wanted is not None:
            stale = Path(folder) / manifest.FILE_NAME
            by_rank_0(lambda: stale.unlink(missing_ok=True))
        return write()
    path = _local(folder)
    mark = by_rank_0(lambda: manifest.begin(path))
    finish = partial(_finish, path, mark, record, has_integrity)
    with _quiet_about_the_mark(path):
        request = write()
    if request is None:
        finish()
    else:  # Megatron's metadata come before the manifest, its tracker after
        request.finalize_fns.append(finish)
    return request


def record_in(state: Any) -> Record | None:
    """The record of Muon's optimizer in a state dict, if it has one on this rank."""
    if isinstance(state, Mapping):
        if RECORD in state:  # in torch_dist a ShardedObject of Megatron's
            return getattr(state[RECORD], "data", state[RECORD])
        state = state.values()
    elif not isinstance(state, (list, tuple)):
        return None
    return next(filter(None, map(record_in, state)), None)


def _finish(
    folder: Path, mark: str, record: Record | None, has_integrity: bool
) -> None:
    """Hash the files and mark the folder as complete. Every rank of the world calls
    it.
    """
    together(lambda: None)  # every rank's files are there
    files: dict[str, Any] = {}
    for of_rank in gathered(lambda: _hashed(folder)):
        files |= of_rank
    wrote = {
        "megatron_muon": __version__,
        "megatron_core": megatron_version()[0],
        "torch": str(torch.__version__),
        "world_size": dist.get_world_size(),
    }
    content = {"wrote": wrote, "record": record, "files": files}
    by_rank_0(lambda: manifest.finish(folder, mark, content))
    if has_integrity:
        own = importlib.import_module("megatron.core.dist_checkpointing.validation")
        by_rank_0(lambda: own.save_integrity_manifest(str(folder)))


def _hashed(folder: Path) -> dict[str, Any]:
    """The sizes and hashes of the shards of torch_dist that this rank has written; on
    rank 0 also those of all files that are no shards.
    """
    # by torch's CRC-32s if it computed them (2.6 can be told not to)
    summed = getattr(torch.serialization, "get_crc32_options", lambda: True)()
    files = {}
    for path in folder.rglob("*"):
        is_later = manifest.is_own(path.name) or path.name == _INTEGRITY
        shard = _SHARD.fullmatch(path.name)
        writer = int(shard[1]) if shard else 0
        if writer == dist.get_rank() and not is_later and path.is_file():
            entry = manifest.entry(path, written=summed)
            files[str(path.relative_to(folder))] = entry
    return files


def _quiet_about_the_mark(folder: Path) -> AbstractContextManager[None]:
    """A context without Megatron's warning of files in the folder if the mark is the
    only one.
    """
    if any(not manifest.is_own(path.name) for path in folder.glob("*")):
        return nullcontext()
    return replaced(
        logging.getLogger("megatron.core.dist_checkpointing.serialization"),
        filter=lambda line: "Overwriting old incomplete" not in line.getMessage(),
    )


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
    global _checked
    if _wanted is None:
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    folder = str(checkpoint_dir)
    if _wanted and Path(folder) != _checked:
        check(folder, record_in(sharded_state_dict))
    _checked = None
    drop_absent(sharded_state_dict, folder)
    with explained(folder):
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)


def check(checkpoint_dir: str, own: Record | None) -> bool:
    """Refuse a checkpoint that is not complete, not intact, or of a different model;
    the next load of it, by ``load``, checks it no more.

    Every rank of the world calls it. Without a manifest rank 0 prints a line. ``own``:
    the record of the optimizer whose state is to be loaded, if any is on this rank.

    Returns:
        Whether the files were compared with a manifest.

    Raises:
        DigestError: on the ranks that find a fault; a RuntimeError on the others.
        NotImplementedError: the folder is in an object store.
    """
    global _checked
    folder = _local(checkpoint_dir)
    saved = together(lambda: manifest.complete(folder))
    if len(set(all_gather_json(saved and saved["hash"], None))) > 1:
        raise DigestError(
            f"ranks see different files at {folder / manifest.FILE_NAME}: a checkpoint "
            "must be on a file system that all of them share"
        )
    if saved is not None:
        together(partial(_require_the_same, folder, saved, own))
    elif dist.get_rank() == 0 and folder.is_dir():
        say(
            f"[megatron_muon] {folder} was saved without a digest "
            f"({manifest.FILE_NAME}), so its files are not checked"
        )
    _checked = folder
    return saved is not None


def forget_check() -> None:
    """Have the next load check its folder, whichever ``check`` was for it."""
    global _checked
    _checked = None


def _require_the_same(folder: Path, saved: Manifest, own: Record | None) -> None:
    """Hash this rank's share of the files; DigestError if one is not as it was written,
    ValueError for another model.
    """
    if own is not None and saved["record"] is not None:
        require_same_matrices(saved["record"], own, str(folder))
    files = saved["files"]
    by_size = sorted(files, key=lambda name: (-files[name]["size"], name))
    mine = sorted(by_size[dist.get_rank() :: dist.get_world_size()])
    with ThreadPoolExecutor(_THREADS) as pool:
        faults = pool.map(
            lambda name: manifest.fault(folder, name, files[name], hashes=True), mine
        )
        bad = {name: fault for name, fault in zip(mine, faults, strict=True) if fault}
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
