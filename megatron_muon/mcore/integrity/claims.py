"""A job's claim on the folder that it saves into, so that no other job saves there at once.

If the file system has locks, the second job stops before it writes anything. In any case all ranks
compare the folder's mark with their own after they have written, before the digest is made. If it
is another job's mark, the folder may have files of both, so neither calls it complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
import torch.distributed as dist

from megatron_muon.console import say
from megatron_muon.files import claim, digest
from megatron_muon.files.claim import Save
from megatron_muon.files.digest import TwoSavesError
from megatron_muon.runtime.collectives import all_gather_texts
from megatron_muon.runtime.consensus import attempt, raise_together, together

_ONE_JOB = (
    "Let one job at a time save there: end one of them, or give it a folder of its own (--save in "
    "Megatron-LM)"
)
_told = False


@dataclass(slots=True)
class SaveClaim:
    """A save that has begun, on one of its ranks.

    Attributes:
        folder: the checkpoint's folder.
        save: identity of the save: rank 0's, on all ranks.
        device: device of the tensors that the world communicates.
        lock: the lock that all ranks share; None if the file system has none.
        place: on rank 0 the folder's device and inode, since another folder may take its name.
        before: without locks, a save that had not ended there when this one began.
        written: all ranks have written all their files, before any other save began.
    """

    folder: Path
    save: Save
    device: torch.device
    lock: BinaryIO | None = None
    place: tuple[int, int] = (0, 0)
    before: Save | None = None
    written: bool = False

    @classmethod
    def stake(cls, folder: Path, wrote: Mapping[str, Any], device: torch.device) -> SaveClaim:
        """Mark the folder as incomplete, and as this save's. Every rank of the world calls it.

        Args:
            folder: the checkpoint's folder.
            wrote: ``wrote`` of the digest.
            device: device of the tensors that the world communicates.

        Raises:
            TwoSavesError: another save is going on there; names its job.
            OSError: the mark cannot be written.
            RuntimeError: only another rank has an error.
        """
        staked = cls(folder, claim.identity(), device)
        first = dist.get_rank() == 0
        _, error = attempt(lambda: staked._begin(wrote) if first else None)
        try:
            raise_together(error, None, device)
            said = json.dumps([staked.save, staked.before])
            staked.save, staked.before = json.loads(all_gather_texts(said, None)[0])
            together(staked._join, None, device)
        except BaseException:
            staked.release()
            raise
        return staked

    def _begin(self, wrote: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        last = digest.saver(self.folder)
        try:
            self.lock = claim.take(self.folder, self.save)
            self.before = digest.unfinished(self.folder) if self.lock is None else None
            digest.begin(self.folder, wrote, self.save)
            claim.share(self.lock)
        except claim.HeldError:
            raise self._refused() from None
        except OSError as error:
            other = digest.saver(self.folder)
            taken = isinstance(error, FileNotFoundError)  # another save has removed our file
            if other not in (None, self.save) and (other != last or taken):
                raise self._refused() from None
            raise
        status = self.folder.stat()
        self.place = (status.st_dev, status.st_ino)
        _tell_of_no_locks(self.lock, self.folder)

    def _join(self) -> None:
        try:
            if dist.get_rank() != 0 and self.lock is None:
                self.lock = claim.join(self.folder)
        except claim.HeldError:
            raise self._refused() from None
        other = digest.other_save(self.folder, self.save)
        if other is not None and (self.folder / digest.FILE_NAME).exists():
            raise self._refused()  # if this rank cannot see it yet, ``require_ours`` will

    def _refused(self) -> TwoSavesError:
        return TwoSavesError(
            f"another save into {self.folder} is going on, that of "
            f"{claim.described(claim.holder(self.folder) or digest.saver(self.folder))}; this one "
            "has written nothing there. "
            f"{_ONE_JOB}"
        )

    def require_ours(self) -> None:
        """Raise if another save has begun since; then the claim ends.

        Every rank of the world calls it, after it has written all its files.

        Raises:
            TwoSavesError: another save has begun; names its job.
            RuntimeError: only another rank has an error.
        """
        try:
            together(self.compare, None, self.device)
        except BaseException as error:
            self.abandon()
            self.raise_explained(error)
        self.written = True

    def compare(self) -> None:
        """Compare the folder's mark with ours, on this rank alone.

        Raises:
            TwoSavesError: the mark is another save's; names its job.
        """
        other = digest.other_save(self.folder, self.save)
        if other is not None:
            raise TwoSavesError(
                f"{self.folder} has files of two saves, so it is not complete: since that of "
                f"{claim.described(self.save)}, {other}. {_ONE_JOB}"
            )

    def finish(self, content: Mapping[str, Any]) -> None:
        """Make the digest; on rank 0 alone, once all ranks have written.

        It looks at the mark again afterwards, since another save may have begun between the first
        look and the writing.

        Args:
            content: see ``digest.finish``.

        Raises:
            TwoSavesError: another save has begun; the folder is not complete.
            OSError: the digest cannot be written.
        """
        self.compare()
        digest.finish(self.folder, content)
        try:
            self.compare()
        except TwoSavesError:
            if digest.saver(self.folder) == self.save:  # our digest replaced the other's mark
                other = digest.contester(self.folder, self.save)
                digest.contest(self.folder, self.save, other)
            raise

    def raise_explained(self, error: BaseException) -> NoReturn:
        """Raise the error that ``explained`` returns."""
        explained = self.explained(error)
        if explained is error:
            raise error
        raise explained from error

    def explained(self, error: BaseException) -> BaseException:
        """The error itself, or a TwoSavesError if another save, which removes files, caused it."""
        _, lost = attempt(self.compare)
        if isinstance(error, TwoSavesError) or (lost is None and self.before is None):
            return error
        if lost is None:
            lost = TwoSavesError(
                f"{type(error).__name__}: {error}. When this save into {self.folder} began, that of"
                f" {claim.described(self.before)}, had not ended: if it goes on, it takes files "
                f"away. {_ONE_JOB}"
            )
        return lost

    def abandon(self) -> None:
        """End a save that has failed. No communication."""
        if dist.get_rank() == 0:
            attempt(self._contest)
        self.release()

    def _contest(self) -> None:
        """Keep the other save from becoming complete: files of ours may be among its own.

        Leave it alone if another folder has taken the name, such as an older one that was put back.
        """
        if self.written:
            return
        status = self.folder.stat()
        if (status.st_dev, status.st_ino) != self.place:
            return
        if digest.other_save(self.folder, self.save) is not None:
            digest.contest(self.folder, self.save, digest.saver(self.folder))

    def release(self) -> None:
        """Let other jobs save there."""
        claim.release(self.lock)
        self.lock = None


def require_free(folder: Path) -> None:
    """Check that no save holds a folder which one process is to change without a claim.

    Raises:
        TwoSavesError: a save into it is going on.
        OSError: its lock cannot be opened.
    """
    if claim.is_held(folder):
        raise TwoSavesError(
            f"a save into {folder} is going on, that of {claim.described(claim.holder(folder))}. "
            f"{_ONE_JOB}"
        )


def _tell_of_no_locks(lock: BinaryIO | None, folder: Path) -> None:
    global _told
    if lock is None and not _told:
        _told = True
        say(
            f"[megatron_muon] the file system of {folder} has no locks: if two jobs save into one "
            "folder, they notice it only after one has written"
        )
