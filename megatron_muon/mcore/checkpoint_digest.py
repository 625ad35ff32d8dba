"""Making a checkpoint's digest where ranks save one, and having it checked where they load it.

``save`` and ``load`` go around ``megatron.core.dist_checkpointing``'s, for all who call it, where
the state dict is that of a model that Muon trains; ``recorded`` and ``seal_recorded`` are for what
is written by ``torch.save`` alone, Megatron-LM's old format.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_muon
from megatron_muon import digest
from megatron_muon.agreement import raise_together
from megatron_muon.checksum import checksum
from megatron_muon.collectives import all_gather_texts
from megatron_muon.digest import Files
from megatron_muon.mcore.checkpoint_check import SHARD, THREADS, check, is_checked
from megatron_muon.mcore.checkpoint_layout import check_layout
from megatron_muon.mcore.checkpoint_model import Table, table_of
from megatron_muon.mcore.checkpoint_owner import (
    Trained,
    Wanted,
    local_folder,
    owner,
    trained_device,
    vocabulary,
    wanted_by_all,
    whole_table,
)
from megatron_muon.mcore.shards import device_of

# --- dist_checkpointing ------------------------------------------------------------------------


def save(
    original: Callable[..., Any],
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's, and the digest. Every rank of the world calls it.

    Raises:
        OSError: the digest, or a file that is to be hashed, cannot be written or read; with an
            asynchronous save when that is finalized.
        RuntimeError: on ranks that have no error themselves when another has.
    """
    saving = Saving.of(owner(sharded_state_dict), str(checkpoint_dir))
    if saving is None:
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    with _quiet_about_the_digest(saving.folder):
        request = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    if request is None:
        saving.seal()
        return None
    request.finalize_fns.append(saving.seal)  # Megatron's metadata come first, its tracker after
    if request.async_fn is None:
        return request
    act = partial(_write_and_hash, request.async_fn, str(saving.folder), dist.get_rank())
    return request._replace(async_fn=act)


def load(
    original: Callable[..., Any],
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's, once the files are those of the digest and the model is that of the checkpoint.

    Raises:
        DigestError: on every rank; names a file and parameters in it, or what differs.
        ValueError: the format cannot load another cut of the model: see ``checkpoint_layout``.
    """
    if not is_checked(str(checkpoint_dir)):
        exact = any(str(key).startswith("optimizer") for key in sharded_state_dict)
        check(owner(sharded_state_dict), str(checkpoint_dir), exact=exact)
    if wanted_by_all(owner(sharded_state_dict)) != Wanted.NOTHING:
        check_layout(sharded_state_dict, str(checkpoint_dir))
    return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)


@contextmanager
def _quiet_about_the_digest(folder: Path) -> Iterator[None]:
    """Megatron warns of files in the folder: not where the mark of the digest is the only one."""
    logger = logging.getLogger("megatron.core.dist_checkpointing.serialization")
    others = any(not digest.own_file(path.name) for path in folder.iterdir())

    def passes(record: logging.LogRecord) -> bool:
        return others or "Overwriting old incomplete" not in record.getMessage()

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def _write_and_hash(
    write: Callable[..., Any], folder: str, rank: int, *args: Any, **kwargs: Any
) -> Any:
    """In the process of an asynchronous save: Megatron's writing, then what the digest needs."""
    result = write(*args, **kwargs)
    digest.write_part(Path(folder), rank, {"files": _described(Path(folder), rank)})
    return result


# --- saving ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Saving:
    """A save that has begun.

    Attributes:
        folder: the checkpoint's.
        content: on rank 0 all of the digest but ``files``; on others empty.
    """

    folder: Path
    content: dict[str, Any]

    @classmethod
    def of(cls, trained: Trained | None, checkpoint_dir: str) -> Saving | None:
        """Mark the folder as incomplete; None where no rank saves a model of Muon's, or the digest
        is switched off. Every rank of the world calls it.

        Raises:
            OSError: the mark cannot be written.
            NotImplementedError: the folder is in an object store.
        """
        wanted = wanted_by_all(trained)
        if wanted == Wanted.NOTHING:
            return None
        folder, device = local_folder(checkpoint_dir, wanted), trained_device(trained)
        error: Exception | None = None
        if dist.get_rank() == 0:
            try:
                if wanted == Wanted.NO_DIGEST:
                    (folder / digest.FILE_NAME).unlink(missing_ok=True)  # another save's
                else:
                    digest.begin(folder, wrote())
            except OSError as own:
                error = own
        raise_together(error, None, device)
        if wanted == Wanted.NO_DIGEST:
            return None
        table = whole_table(trained)
        return cls(folder, _content(trained, table) if dist.get_rank() == 0 else {})

    def seal(self) -> None:
        """Hash the files and mark the folder as complete. Every rank of the world calls it.

        Raises:
            OSError: a file cannot be read, or the digest not be written.
            RuntimeError: on ranks that have no error themselves when another has.
        """
        error: Exception | None = None
        files: Files = {}
        try:
            files = self._own_files()
        except Exception as own:  # whatever it is, the other ranks must hear of it
            error = own
        raise_together(error, None, device_of([]))
        every = all_gather_texts(json.dumps(files), None)
        if dist.get_rank() == 0:
            try:
                merged = {name: entry for text in every for name, entry in json.loads(text).items()}
                digest.finish(self.folder, {**self.content, "files": merged})
            except OSError as own:
                error = own
        raise_together(error, None, device_of([]))

    def _own_files(self) -> Files:
        rank = dist.get_rank()
        left = digest.read_part(self.folder, rank)
        files: Files = left["files"] if left else _described(self.folder, rank)
        if rank == 0:
            names = [name for name in _names(self.folder) if not SHARD.search(name)]
            files = {**files, **_hashed(self.folder, names)}
        return files


def wrote() -> dict[str, Any]:
    """``wrote`` of a digest."""
    return {
        "megatron_muon": megatron_muon.__version__,
        "megatron_core": str(importlib.import_module("megatron.core").__version__),
        "torch": str(torch.__version__),
        "world_size": dist.get_world_size(),
    }


def _content(trained: Trained | None, table: Table) -> dict[str, Any]:
    return {
        "wrote": wrote(),
        "optimizer": "muon",
        "settings": asdict(trained.config) if trained else None,
        "vocabulary": vocabulary(),
        "parameters": table,
    }


def _names(folder: Path) -> list[str]:
    """All files of a checkpoint, by their paths in it."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not digest.own_file(path.name)
    ]


def _described(folder: Path, rank: int) -> Files:
    """The shards of torch_dist that a rank wrote."""
    return _hashed(folder, [path.name for path in folder.glob(f"__{rank}_*.distcp")])


def _hashed(folder: Path, names: Sequence[str]) -> Files:
    with ThreadPoolExecutor(THREADS) as pool:
        entries = pool.map(lambda name: digest.describe(folder / name, _just_written), names)
        return dict(zip(names, entries, strict=True))


def _just_written(path: Path) -> str:
    """Its checksum, with what torch has summed up, if it has: since 2.6 it can be told not to."""
    summed = getattr(torch.serialization, "get_crc32_options", lambda: True)()
    return checksum(path, written=summed)


# --- what torch.save writes --------------------------------------------------------------------


@contextmanager
def recorded(trained: Trained | None, folder: Path) -> Iterator[None]:
    """Within it, what this rank writes into the folder by ``torch.save`` is hashed, and a part of
    the digest left there for ``seal_recorded``. No communication."""
    if trained is None:
        yield
        return
    own = torch.save
    files: Files = {}
    table = table_of(trained.model_chunks(), trained.config, trained.stage)
    holds = sorted(table, key=lambda name: (table[name]["optimizer"] != "muon", name))[:3]

    def save_and_hash(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        own(obj, f, *args, **kwargs)
        if isinstance(f, (str, os.PathLike)) and folder in Path(f).parents:
            entry = digest.describe(Path(f), _just_written)
            files[str(Path(f).relative_to(folder))] = {**entry, "holds": holds}
            part = {"files": files, "parameters": table}
            digest.write_part(folder, dist.get_rank(), part)

    torch.save = save_and_hash
    try:
        yield
    finally:
        torch.save = own


def seal_recorded(saving: Saving) -> None:
    """Mark the folder as complete, once all ranks have left ``recorded``; on rank 0 alone.

    Raises:
        OSError: the digest cannot be written.
    """
    files: Files = {}
    table: Table = dict(saving.content["parameters"])
    for part in digest.read_parts(saving.folder):
        files.update(part["files"])
        table.update(part["parameters"])
    digest.finish(saving.folder, {**saving.content, "parameters": table, "files": files})
