"""Making a checkpoint's digest at a save, and checking it at a load.

``save`` and ``load`` wrap those of ``megatron.core.dist_checkpointing`` for all
callers. They act if the state dict is of a model that Muon trains. ``sealing`` does the
same around a save in Megatron-LM's old format, which only ``torch.save`` writes.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_muon.mcore.checkpoint.buffers import (
    HOME_STATE,
    OTHER_CUT,
    OTHER_UNITS,
)
from megatron_muon.mcore.load_check import digest
from megatron_muon.mcore.load_check.check import (
    THREADS,
    check,
    is_checked,
    local_folder,
)
from megatron_muon.mcore.load_check.checksum import checksum
from megatron_muon.mcore.load_check.digest import Digest, Files, Save
from megatron_muon.mcore.load_check.files import Lock, open_regular
from megatron_muon.mcore.load_check.models import (
    TrainedModel,
    device_of_trained,
    digest_wanted,
    owner,
)
from megatron_muon.mcore.load_check.same_model import parameters_in_digest
from megatron_muon.runtime.collectives import all_gather_json
from megatron_muon.runtime.consensus import together
from megatron_muon.settings.config import named
from megatron_muon.settings.rules import row_of
from megatron_muon.version import __version__

_SAME_OPTIMIZER = (
    "Each parameter must belong to the same optimizer as at the save "
    f"({named('muon_include')}, {named('muon_exclude')})"
)
# A key of optimizer state in torch_dist, of a unit, a model-parallel rank or a whole
# weight, and what it takes to find it there.
_STATE = (
    (
        re.compile(rf"optimizer\.state\.{HOME_STATE}_(?P<rule>\w+)\.[^\]\s]*\]?"),
        OTHER_UNITS,
    ),
    (
        re.compile(r"optimizer\.distributed\.dp_group_idx_\d+\.[\w.]*\w"),
        f"{_SAME_OPTIMIZER}. {OTHER_CUT}",
    ),
    (
        re.compile(r"(chained_\d+\.)?optimizer\.state\.[\w.]*\w"),
        f"{_SAME_OPTIMIZER}; AdamW's own checkpoint loads within "
        "megatron_muon.reading_adamw. The format must be that of the save (metadata of "
        "sharded_state_dict), and before core 0.14 EP must stay 1 or stay above 1",
    ),
)
T = TypeVar("T")

_ONE_JOB = "Let only one job save there, or give each a folder of its own"
# Megatron lists all that there are
_KEYS_THERE = re.compile(r"not in state dict: \[[^\n]*")
_MANIFEST = "integrity.json"  # Megatron's, which has the digest's hash, too
# torch_dist: the rank that wrote it, and a number
_SHARD = re.compile(r"__\d+_\d+\.distcp$")


def save(
    original: Callable[..., Any],
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's save, and the digest. Every rank of the world calls it."""
    saving = Saving.begin(owner(sharded_state_dict), str(checkpoint_dir))
    if saving is None:
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    # since core 0.19; the digest comes first
    has_manifest = kwargs.pop("verify_integrity", False)
    seal = partial(saving.seal, has_manifest=has_manifest)
    with saving.unlocked_by_an_error(), _quiet_about_the_mark(saving.folder):
        request = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    if request is None:
        seal()
    else:  # Megatron's metadata come before the digest, its tracker after
        request.finalize_fns.append(seal)
    return request


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
    trained = owner(sharded_state_dict)
    folder = str(checkpoint_dir)
    if not is_checked(folder):
        exact = any(str(key).startswith("optimizer") for key in sharded_state_dict)
        check(trained, folder, exact=exact)
    rule = "muon" if trained is None else trained.config.rule
    if row_of(rule).has_moments:
        from megatron_muon.mcore.checkpoint.absent import drop_absent

        drop_absent(sharded_state_dict, checkpoint_dir, rule)
    with _explained(folder) if trained is not None else nullcontext():
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)


@contextmanager
def _explained(folder: str) -> Iterator[None]:
    """Add the way out to an error that names optimizer state which is not in the
    checkpoint.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        text = _KEYS_THERE.sub("", str(error))
        for pattern, way_out in _STATE:
            if key := pattern.search(text):
                way_out = way_out.format_map(key.groupdict())
                text = (
                    f"{folder} has no {key[0]}, or has it in another shape. {way_out}"
                )
                raise ValueError(text) from error
        raise


@contextmanager
def sealing(
    trained: TrainedModel | None, folder: Path, names: list[str]
) -> Iterator[None]:
    """Mark a folder before a save by ``torch.save``, and write its digest after it.

    All ranks of the world enter and exit it together. ``names`` are the files that this
    rank, or a replica of it, writes there. A file that stays as it was is not part of
    this save.
    """
    saving = Saving.begin(trained, str(folder))
    if saving is None:
        yield
        return
    before = {name: _stamp(folder / name) for name in names}
    with saving.unlocked_by_an_error():
        yield
    saving.seal(
        [name for name in names if _stamp(folder / name) not in (before[name], None)]
    )


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Inode, time of the last change and size; None where there is no file that can be
    read.
    """
    try:
        with open_regular(
            path
        ) as file:  # opened, since a network file system then asks anew
            status = os.fstat(file.fileno())
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


@contextmanager
def _quiet_about_the_mark(folder: Path) -> Iterator[None]:
    """Silence Megatron's warning of files in the folder if the digest's mark is the
    only one.
    """
    logger = logging.getLogger("megatron.core.dist_checkpointing.serialization")
    others = folder.is_dir() and any(
        not digest.own_file(path.name) for path in folder.iterdir()
    )

    def passes(record: logging.LogRecord) -> bool:
        return others or "Overwriting old incomplete" not in record.getMessage()

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def _begin(folder: Path, wrote: Mapping[str, Any], save: Save) -> Lock | None:
    """Lock a folder and mark it for the save; make it if it is missing.

    Raises:
        RuntimeError: another job's save holds the lock.
        OSError: the folder, its lock or its mark cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / digest.LOCK_NAME
    try:
        lock = Lock.take(path)
    except BlockingIOError as error:
        raise RuntimeError(
            f"another job saves into {folder} "
            f"({digest.saved_by(digest.saver(folder))}), so this save has written "
            f"nothing there. {_ONE_JOB}. If that job's node was lost and its file "
            f"system still keeps the lock, remove {path}"
        ) from error
    try:
        digest.begin(folder, wrote, save)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return lock


def _on_rank_0(act: Callable[[], T], device: torch.device) -> T | None:
    """What ``act`` returns on rank 0; an error there stops all ranks."""
    return together(lambda: act() if dist.get_rank() == 0 else None, None, device)


@dataclass(frozen=True, slots=True)
class Saving:
    """A save that has begun.

    Rank 0 holds the folder's lock from before the mark until after the digest, so a
    second job is refused before it writes. Where the file system has no locks, or none
    that hold on other nodes, the marks tell of a second job: each rank looks for its
    save's mark when its files are written, and rank 0 once more before it writes the
    digest. A job that began earlier and has not looked yet when a later one ends is
    then not seen by it.
    """

    folder: Path
    save: Save  # on rank 0 the one that it marks the folder with
    device: torch.device
    lock: Lock | None  # on rank 0, where the file system has locks
    # the digest without files on rank 0; empty on other ranks
    content: Digest

    @classmethod
    def begin(cls, trained: TrainedModel | None, checkpoint_dir: str) -> Saving | None:
        """Lock the folder and mark it as incomplete. Every rank of the world calls it.

        It is None if no rank saves a model of Muon's, or the digest is switched off.

        Raises:
            RuntimeError: another job saves into the folder.
        """
        wanted = digest_wanted(trained)
        if wanted is None:
            return None
        device = device_of_trained(trained)
        # an earlier save's digest does not fit what is written now
        if not wanted:
            stale = Path(checkpoint_dir) / digest.FILE_NAME
            _on_rank_0(lambda: stale.unlink(missing_ok=True), device)
            return None
        folder = local_folder(checkpoint_dir)
        parameters = parameters_in_digest(trained)
        save = digest.new_save()
        wrote = {
            "megatron_muon": __version__,
            "megatron_core": str(importlib.import_module("megatron.core").__version__),
            "torch": str(torch.__version__),
            "world_size": dist.get_world_size(),
        }
        lock = _on_rank_0(lambda: _begin(folder, wrote, save), device)
        content = {
            "wrote": wrote,
            "save": save,
            "optimizer": "muon",
            "settings": asdict(trained.config) if trained else None,
            "parameters": parameters,
        }
        return cls(folder, save, device, lock, content if dist.get_rank() == 0 else {})

    @contextmanager
    def unlocked_by_an_error(self) -> Iterator[None]:
        """Drop the lock if the block raises: this save is not sealed any more."""
        try:
            yield
        except BaseException:
            self._unlock()
            raise

    def _unlock(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def seal(
        self, names: Sequence[str] | None = None, *, has_manifest: bool = False
    ) -> None:
        """Hash the files and mark the folder as complete. Every rank of the world calls
        it.

        The lock is dropped at its end.

        ``names`` are the files that this rank has written by ``torch.save``; None: of
        torch_dist.
        ``has_manifest``: Megatron's own hashes come after it (``--verify-integrity``).
        """
        try:
            part = together(lambda: self._part(names), None, self.device)
            parts = all_gather_json(part, None)
            _on_rank_0(lambda: self._finish(parts), self.device)
        finally:
            self._unlock()
        if has_manifest:  # of what stays: the lock's file is gone
            _on_rank_0(self._write_manifest, self.device)

    def _part(self, names: Sequence[str] | None) -> dict[str, Any]:
        """This rank's part: the save whose mark it sees, and the files that it wrote.

        It looks at the mark before it hashes. A save that replaces the mark after that
        has begun when this one's files were written, and stays whole.
        """
        saver = digest.saver(self.folder)
        names = self._written() if names is None else names
        # by torch's CRC-32s if it computed them (2.6 can be told not to)
        summed = getattr(torch.serialization, "get_crc32_options", lambda: True)()

        def entry(name: str) -> dict[str, Any]:
            path = self.folder / name
            return {"size": path.stat().st_size, "hash": checksum(path, written=summed)}

        with ThreadPoolExecutor(THREADS) as pool:
            files = dict(zip(names, pool.map(entry, names), strict=True))
        return {"save": saver, "files": files}

    def _written(self) -> list[str]:
        """The files of torch_dist that this rank has written; rank 0 adds those of no
        rank.
        """
        rank = dist.get_rank()
        names = [path.name for path in self.folder.glob(f"__{rank}_*.distcp")]
        for path in self.folder.rglob("*") if rank == 0 else ():
            is_written_later = digest.own_file(path.name) or path.name == _MANIFEST
            is_ranks = _SHARD.search(path.name) is not None
            if path.is_file() and not (is_written_later or is_ranks):
                names.append(str(path.relative_to(self.folder)))
        return names

    def _finish(self, parts: Sequence[Digest]) -> None:
        for rank, part in enumerate(parts):
            if self._is_others(part["save"], rank):
                # marked anew, so that the other save is not sealed
                digest.begin(self.folder, self.content["wrote"], self.save)
                raise RuntimeError(
                    f"{self.folder} may contain files of two saves, so it is not "
                    f"complete: {digest.saved_by(self.save)}, and "
                    f"{digest.saved_by(part['save'])}. {_ONE_JOB}"
                )
        files: Files = {}
        for part in parts:
            files |= part["files"]
        if not files:
            raise RuntimeError(f"This save wrote no files into {self.folder}")
        saver = digest.saver(self.folder)
        if self._is_others(saver, rank=0):
            raise RuntimeError(
                f"another save has begun in {self.folder} ({digest.saved_by(saver)}) "
                f"before this one was complete ({digest.saved_by(self.save)}). "
                f"{_ONE_JOB}"
            )
        digest.finish(self.folder, {**self.content, "files": files})

    def _write_manifest(self) -> None:
        """Megatron's own hashes of all files, the digest's among them."""
        module = importlib.import_module("megatron.core.dist_checkpointing.validation")
        module.save_integrity_manifest(str(self.folder))

    def _is_others(self, saver: Save | None, rank: int) -> bool:
        """Whether the mark that a rank sees is another save's; it must see one."""
        if saver is None:
            raise RuntimeError(
                f"rank {rank} does not see {self.folder / digest.FILE_NAME}: it was "
                "removed during the save, or the folder is not on a file system that "
                "all ranks share"
            )
        return bool(saver["id"] != self.save["id"])
