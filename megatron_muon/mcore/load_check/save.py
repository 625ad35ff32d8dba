"""Making a checkpoint's digest at a save, and checking it at a load.

``save`` and ``load`` wrap those of ``megatron.core.dist_checkpointing`` for all callers. They act
if the state dict is of a model that Muon trains. ``sealed`` does the same around a save in
Megatron-LM's old format, which only ``torch.save`` writes.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.mcore.checkpoint.metadata import check_layout
from megatron_muon.mcore.load_check import digest
from megatron_muon.mcore.load_check.check import SHARD, THREADS, check, is_checked
from megatron_muon.mcore.load_check.checksum import checksum
from megatron_muon.mcore.load_check.digest import Files, Save
from megatron_muon.mcore.load_check.model_table import table_of
from megatron_muon.mcore.load_check.models import (
    Wanted,
    Whole,
    local_folder,
    owner,
    trained_device,
    vocabulary,
    wanted_by_all,
    whole_model,
)
from megatron_muon.mcore.load_check.regular_files import open_regular
from megatron_muon.mcore.wiring.trained import TrainedModel
from megatron_muon.runtime.collectives import all_gather_texts
from megatron_muon.runtime.consensus import together
from megatron_muon.version import __version__

# --- the wrappers --------------------------------------------------------------------------------


def save(
    original: Callable[..., Any],
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's save, and the digest. Every rank of the world calls it.

    Raises:
        OSError: the digest cannot be written, or a file to be hashed cannot be read. An
            asynchronous save raises it when it is finalized.
        RuntimeError: only another rank has an error, or another save has written there meanwhile.
    """
    saving = Saving.of(lambda: owner(sharded_state_dict), str(checkpoint_dir))
    if saving is None:
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    together(_require_psutil, None, saving.device)
    with _quiet_about_the_digest(saving.folder):
        request = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    if request is None:
        saving.seal()
    else:  # Megatron's metadata come before the digest, its tracker after
        request.finalize_fns.append(saving.seal)
    return request


def load(
    original: Callable[..., Any],
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's load, after checking the files and the model against the digest.

    Raises:
        DigestError: on ranks that find a fault; names a file and parameters in it, or the first
            difference.
        RuntimeError: only another rank has an error.
        ValueError: the format cannot load another cut of the model: see ``checkpoint.metadata``.
    """
    if not is_checked(str(checkpoint_dir)):
        exact = any(str(key).startswith("optimizer") for key in sharded_state_dict)
        check(lambda: owner(sharded_state_dict), str(checkpoint_dir), exact=exact)
    _, wanted = wanted_by_all(lambda: owner(sharded_state_dict))
    if wanted != Wanted.NOTHING:
        check_layout(sharded_state_dict, str(checkpoint_dir))
    return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)


@contextmanager
def sealed(
    find: Callable[[], TrainedModel | None], folder: Path, names: list[str]
) -> Iterator[None]:
    """Mark a folder before a save by ``torch.save``, and write its digest after it.

    Every rank of the world enters and leaves it together.

    Args:
        find: returns the model of Muon's that this rank saves, if any.
        folder: the checkpoint's folder.
        names: paths in the folder of the files that this rank, or a replica of it, writes. Those
            that stay as they were are not of this save.

    Raises:
        OSError, RuntimeError: see ``save``.
    """
    saving = Saving.of(find, str(folder))
    if saving is None:
        yield
        return
    holds = together(lambda: _first_held(find()), None, saving.device)
    before = [_stamp(folder / name) for name in names]
    yield
    written = [
        name
        for name, old in zip(names, before, strict=True)
        if _stamp(folder / name) not in (old, None)
    ]
    saving.seal(written, holds)


def _first_held(trained: TrainedModel | None) -> list[str]:
    """Names of three of this rank's parameters, Muon's first."""
    if trained is None:
        return []
    table = table_of(trained.model_chunks(), trained.config, trained.stage)
    return sorted(table, key=lambda name: (table[name]["optimizer"] != "muon", name))[:3]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Inode, time of the last change and size; None where there is no file that can be read."""
    try:
        with open_regular(path) as file:  # opened, since a network file system then asks anew
            status = os.fstat(file.fileno())
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


@contextmanager
def _quiet_about_the_digest(folder: Path) -> Iterator[None]:
    """Silence Megatron's warning of files in the folder if the digest's mark is the only one."""
    logger = logging.getLogger("megatron.core.dist_checkpointing.serialization")
    others = folder.is_dir() and any(not digest.own_file(path.name) for path in folder.iterdir())

    def passes(record: logging.LogRecord) -> bool:
        return others or "Overwriting old incomplete" not in record.getMessage()

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def _require_psutil() -> None:
    """Raise before Megatron's writer processes would, for which its save would wait for ever.

    Raises:
        ModuleNotFoundError: psutil is missing, which the writers of core 0.13 and later need.
    """
    writers = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    if not getattr(importlib.import_module(writers), "HAVE_PSUTIL", True):
        raise ModuleNotFoundError("Megatron's saves need psutil: pip install psutil", name="psutil")


# --- saving --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Saving:
    """A save that has begun.

    Attributes:
        folder: the checkpoint's folder.
        save: rank 0's ``digest.new_save``, on all ranks.
        device: device of the tensors that the world communicates.
        content: the digest without ``files`` on rank 0; empty on other ranks.
    """

    folder: Path
    save: Save
    device: torch.device
    content: Mapping[str, Any]

    @classmethod
    def of(cls, find: Callable[[], TrainedModel | None], checkpoint_dir: str) -> Saving | None:
        """Mark the folder as incomplete. Every rank of the world calls it.

        Args:
            find: returns the model of Muon's that this rank saves, if any.
            checkpoint_dir: the checkpoint's folder.

        Returns:
            None if no rank saves a model of Muon's, or the digest is switched off.

        Raises:
            OSError: the mark cannot be written.
            NotImplementedError: the folder is in an object store.
            RuntimeError: only another rank has an error.
        """
        trained, wanted = wanted_by_all(find)
        if wanted == Wanted.NOTHING:
            return None
        folder, device = local_folder(checkpoint_dir, wanted), trained_device(trained)
        first = dist.get_rank() == 0
        if wanted == Wanted.NO_DIGEST:  # an earlier save's digest has not what is written now
            stale = folder / digest.FILE_NAME
            together(lambda: stale.unlink(missing_ok=True) if first else None, None, device)
            return None
        whole = whole_model(trained)
        save: Save = json.loads(all_gather_texts(json.dumps(digest.new_save()), None)[0])
        together(lambda: digest.begin(folder, wrote(), save) if first else None, None, device)
        content = _content(trained, whole, save) if first else {}
        return cls(folder, save, device, content)

    def seal(self, names: Sequence[str] | None = None, holds: Sequence[str] = ()) -> None:
        """Hash the files and mark the folder as complete. Every rank of the world calls it.

        Args:
            names: paths in the folder of the files that this rank has written, by ``torch.save``;
                None for those of torch_dist.
            holds: names of some parameters in each of them.

        Raises:
            OSError: a file cannot be read, or the digest cannot be written.
            RuntimeError: only another rank has an error, or another save has written there.
        """
        part = together(lambda: self._part(names, holds), None, self.device)
        parts = [json.loads(text) for text in all_gather_texts(json.dumps(part), None)]
        first = dist.get_rank() == 0
        together(lambda: self._finish(parts) if first else None, None, self.device)

    def _part(self, names: Sequence[str] | None, holds: Sequence[str]) -> dict[str, Any]:
        """This rank's part: the save whose mark it sees, and the files that it wrote."""
        if names is None:
            rank = dist.get_rank()
            names = [path.name for path in self.folder.glob(f"__{rank}_*.distcp")]
            if rank == 0:
                names += [name for name in _names(self.folder) if not SHARD.search(name)]
        with ThreadPoolExecutor(THREADS) as pool:
            entries = pool.map(
                lambda name: digest.describe(self.folder / name, _just_written), names
            )
            files = dict(zip(names, entries, strict=True))
        if holds:
            files = {name: {**entry, "holds": holds} for name, entry in files.items()}
        return {"save": digest.saver(self.folder), "files": files}

    def _finish(self, parts: Sequence[Mapping[str, Any]]) -> None:
        for rank, part in enumerate(parts):
            if part["save"] is None:
                raise RuntimeError(
                    f"rank {rank} does not see {self.folder / digest.FILE_NAME}: it was removed "
                    "during the save, or the folder is not on a file system that all ranks share"
                )
            if part["save"]["id"] != self.save["id"]:
                digest.begin(self.folder, wrote(), self.save)  # so that the other is not sealed
                raise RuntimeError(
                    f"{self.folder} may have files of two saves, so it is not complete: that of "
                    f"{digest.described(self.save)}, and that of {digest.described(part['save'])}. "
                    "Let one job at a time save there, or give each a folder of its own"
                )
        files: Files = {name: entry for part in parts for name, entry in part["files"].items()}
        if not files:
            raise RuntimeError(f"this save has written no file into {self.folder}, as far as seen")
        digest.finish(self.folder, {**self.content, "files": files})


def wrote() -> dict[str, Any]:
    """``wrote`` of a digest: versions and world size."""
    return {
        "megatron_muon": __version__,
        "megatron_core": str(importlib.import_module("megatron.core").__version__),
        "torch": str(torch.__version__),
        "world_size": dist.get_world_size(),
    }


def _content(trained: TrainedModel | None, whole: Whole, save: Save) -> dict[str, Any]:
    return {
        "wrote": wrote(),
        "save": save,
        "optimizer": "muon",
        "settings": asdict(trained.config) if trained else None,
        "vocabulary": vocabulary(),
        "model": whole.settings,
        "parameters": whole.table,
    }


def _names(folder: Path) -> list[str]:
    """Paths of a checkpoint's files, relative to its folder."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not digest.own_file(path.name)
    ]


def _just_written(path: Path) -> str:
    """A file's checksum, from torch's CRC-32s if it computed them (2.6 can be told not to)."""
    summed = getattr(torch.serialization, "get_crc32_options", lambda: True)()
    return checksum(path, written=summed)
