"""Making a checkpoint's digest at a save, and checking it at a load.

``save`` and ``load`` wrap those of ``megatron.core.dist_checkpointing`` for all callers. They act
if the state dict is of a model that Muon trains. ``recorded`` does the same for Megatron-LM's old
format, which only ``torch.save`` writes.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.files import claim, digest, digest_parts
from megatron_muon.files.checksum import checksum
from megatron_muon.files.claim import Save
from megatron_muon.files.digest import Files, TwoSavesError
from megatron_muon.mcore.checkpoint.metadata import check_layout
from megatron_muon.mcore.integrity.claims import SaveClaim, require_free
from megatron_muon.mcore.integrity.registry import (
    TrainedModel,
    Wanted,
    Whole,
    local_folder,
    owner,
    trained_device,
    vocabulary,
    wanted_by_all,
    whole_model,
)
from megatron_muon.mcore.integrity.verify import SHARD, THREADS, check, is_checked
from megatron_muon.runtime.collectives import all_gather_texts
from megatron_muon.runtime.consensus import together
from megatron_muon.version import __version__

# --- dist_checkpointing ------------------------------------------------------------------------


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
        TwoSavesError: another save into the folder is going on, or has begun meanwhile.
        RuntimeError: only another rank has an error.
    """
    saving = Saving.of(lambda: owner(sharded_state_dict), str(checkpoint_dir))
    if saving is None:
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    try:
        together(_require_psutil, None, saving.claim.device)
        with _quiet_about_the_digest(saving.folder):
            request = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    except BaseException as error:
        saving.claim.abandon()
        saving.claim.raise_explained(error)
    if request is None:
        saving.seal()
        return None
    first = [partial(saving.explaining, function) for function in request.finalize_fns]
    # Megatron's metadata come before the digest, its tracker after
    request.finalize_fns[:] = [*first, saving.seal]
    if request.async_fn is None:
        return request
    rank, save = dist.get_rank(), saving.claim.save
    act = partial(_write_and_hash, request.async_fn, str(saving.folder), rank, save)
    return request._replace(async_fn=act)


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


def _write_and_hash(
    write: Callable[..., Any], folder: str, rank: int, save: Save, *args: Any, **kwargs: Any
) -> Any:
    """In the process of an asynchronous save: Megatron's writing, then what the digest needs."""
    lock = claim.join(Path(folder))  # this process may outlive the rank
    try:
        other = digest.other_save(Path(folder), save)
        if other is not None:
            raise TwoSavesError(f"{folder} is not written into: {other}")
        result = write(*args, **kwargs)
        part = {"files": _described(Path(folder), rank)}
        digest_parts.write_part(Path(folder), save, rank, part)
        return result
    finally:
        claim.release(lock)


# --- saving ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Saving:
    """A save that has begun.

    Attributes:
        claim: the claim on the checkpoint's folder.
        content: the digest without ``files`` on rank 0; empty on other ranks.
    """

    claim: SaveClaim
    content: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return self.claim.folder

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
            TwoSavesError: another save into it is going on.
            NotImplementedError: the folder is in an object store.
            RuntimeError: only another rank has an error.
        """
        trained, wanted = wanted_by_all(find)
        if wanted == Wanted.NOTHING:
            return None
        folder, device = local_folder(checkpoint_dir, wanted), trained_device(trained)
        if wanted == Wanted.NO_DIGEST:
            first = dist.get_rank() == 0
            together(lambda: _unmark(folder) if first else None, None, device)
            return None
        whole = whole_model(trained)
        staked = SaveClaim.stake(folder, wrote(), device)
        content = _content(trained, whole, staked.save) if dist.get_rank() == 0 else {}
        return cls(staked, content)

    def explaining(self, function: Callable[[], Any]) -> Any:
        """The result of ``function``; if it fails, say since a writer process did, the claim ends.

        Raises:
            TwoSavesError: ``function`` failed since another save into the folder has begun.
            BaseException: any other error of ``function``.
        """
        try:
            return function()
        except BaseException as error:
            self.claim.abandon()
            self.claim.raise_explained(error)

    def seal(self) -> None:
        """Hash the files and mark the folder as complete. Every rank of the world calls it.

        Raises:
            OSError: a file cannot be read, or the digest cannot be written.
            TwoSavesError: another save into the folder has begun meanwhile.
            RuntimeError: only another rank has an error.
        """
        device = self.claim.device
        self.claim.require_ours()
        try:
            files = together(self._own_files, None, device)
            every = all_gather_texts(json.dumps(files), None)
            self.claim.require_ours()
            merged = {name: entry for text in every for name, entry in json.loads(text).items()}
            together(lambda: self._finish(merged), None, device)
        except BaseException as error:
            self.claim.raise_explained(error)
        finally:
            self.claim.release()

    def _finish(self, files: Files) -> None:
        if dist.get_rank() == 0:
            self.claim.finish({**self.content, "files": files})

    def _own_files(self) -> Files:
        rank = dist.get_rank()
        left = digest_parts.read_part(self.folder, self.claim.save, rank)
        files: Files = left["files"] if left else _described(self.folder, rank)
        if left:
            require_unchanged(self.folder, files)
        if rank == 0:
            names = [name for name in _names(self.folder) if not SHARD.search(name)]
            files = {**files, **hashed(self.folder, names)}
        return files


def is_seal(function: Any) -> bool:
    """Whether a function that finalizes an asynchronous save makes a digest."""
    return getattr(function, "__func__", None) is Saving.seal


def _unmark(folder: Path) -> None:
    """Remove an earlier save's digest, since the files written now are not in it."""
    require_free(folder)
    (folder / digest.FILE_NAME).unlink(missing_ok=True)


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


def _described(folder: Path, rank: int) -> Files:
    """``files`` of a digest, for the torch_dist shards that a rank wrote."""
    return hashed(folder, [path.name for path in folder.glob(f"__{rank}_*.distcp")])


def hashed(folder: Path, names: Sequence[str]) -> Files:
    """``files`` of a digest, for files that torch has just written."""
    with ThreadPoolExecutor(THREADS) as pool:
        entries = pool.map(lambda name: digest.describe(folder / name, _just_written), names)
        return dict(zip(names, entries, strict=True))


def require_unchanged(folder: Path, files: Files) -> None:
    """Check that files still have the size and hash that were recorded; little of them is read.

    Raises:
        OSError: a file was changed, so another job or command writes into the folder.
    """
    now = hashed(folder, list(files))
    for name, entry in files.items():
        if (now[name]["size"], now[name]["hash"]) != (entry["size"], entry["hash"]):
            raise OSError(
                f"{folder / name} was changed since this save wrote it: another job or a command "
                "writes into the same folder. Let one job save there"
            )


def _just_written(path: Path) -> str:
    """A file's checksum, from torch's CRC-32s if it computed them (2.6 can be told not to)."""
    summed = getattr(torch.serialization, "get_crc32_options", lambda: True)()
    return checksum(path, written=summed)
