"""The digest of a checkpoint in Megatron-LM's format ``torch``, which only ``torch.save`` writes.

Ranks also vote at Megatron's barriers. If this package's work or ``torch.save`` fails on one rank
between two barriers, all ranks raise at the next one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.files import digest_parts
from megatron_muon.files.digest import Files
from megatron_muon.mcore.integrity.model_table import Table, table_of
from megatron_muon.mcore.integrity.registry import TrainedModel
from megatron_muon.mcore.integrity.save_load import Saving, hashed, require_unchanged
from megatron_muon.runtime.consensus import attempt, raise_together, together
from megatron_muon.runtime.patches import replaced


class Votes:
    """Errors of this rank that wait for the next vote."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.checks: list[Callable[[], None]] = []  # called before each vote, on this rank
        self._error: BaseException | None = None

    def keep(self, error: BaseException | None) -> None:
        """Keep an error for the next vote, unless an earlier one is kept."""
        self._error = self._error or error

    def keeps(self, error: BaseException) -> bool:
        """Whether this error still waits for a vote."""
        return self._error is error

    def exchange(self, error: BaseException, other: BaseException) -> None:
        """Keep ``other`` in place of ``error``, if that one is kept."""
        if self._error is error:
            self._error = other

    def vote(self) -> None:
        """Raise on all ranks if one has an error. Every rank of the world calls it.

        Raises:
            BaseException: this rank's error.
            RuntimeError: only another rank has an error.
        """
        for check in self.checks:
            if self._error is None:
                self.keep(attempt(check)[1])
        error, self._error = self._error, None
        raise_together(error, None, self.device)


@contextmanager
def voting(device: torch.device) -> Iterator[Votes]:
    """Turn Megatron's barriers of the whole world into votes, and vote once more at the end.

    Every rank of the world enters and leaves it together.

    Args:
        device: device of the tensors that the world communicates.
    """
    votes = Votes(device)
    own = dist.barrier

    def barrier(*args: Any, **kwargs: Any) -> Any:
        if args or any(value not in (None, False) for value in kwargs.values()):
            return own(*args, **kwargs)
        return votes.vote()

    try:
        with replaced(dist, barrier=barrier):
            yield votes
    except BaseException as error:
        if votes.keeps(error):  # Megatron waits for this rank only, so the others have not voted
            votes.vote()
        raise
    votes.vote()


@contextmanager
def recorded(trained: TrainedModel | None, saving: Saving, votes: Votes) -> Iterator[None]:
    """Hash each file that this rank's ``torch.save`` writes into the folder.

    It leaves the rank's part of the digest there for ``seal_recorded``.

    Args:
        trained: the model of Muon's on this rank, if any.
        saving: the save.
        votes: the votes of the ``voting`` around it. Errors of ``torch.save`` wait for them, too.
            Before each vote the rank checks that folder's mark and its files are still its own.

    Raises:
        TwoSavesError: at a vote; another save into the folder has begun meanwhile.
    """
    own = torch.save
    files: Files = {}
    table: Table = together(lambda: _own_table(trained), None, votes.device)
    holds = sorted(table, key=lambda name: (table[name]["optimizer"] != "muon", name))[:3]
    folder = saving.folder

    def describe(path: Path) -> None:
        name = str(path.relative_to(folder))
        files[name] = {**hashed(folder, [name])[name], "holds": holds}
        part = {"files": files, "parameters": table}
        digest_parts.write_part(folder, saving.claim.save, dist.get_rank(), part)

    def save_and_hash(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, (str, os.PathLike)) or folder not in Path(f).parents:
            return own(obj, f, *args, **kwargs)
        _, error = attempt(lambda: own(obj, f, *args, **kwargs))
        if error is None:
            _, error = attempt(lambda: describe(Path(f)))
        votes.keep(error)
        return None

    def check() -> None:
        saving.claim.compare()
        require_unchanged(folder, files)

    votes.checks.append(check)
    try:
        with replaced(torch, save=save_and_hash):
            yield
    except BaseException as error:
        saving.claim.abandon()
        explained = saving.claim.explained(error)
        votes.exchange(error, explained)
        if explained is error:
            raise
        raise explained from error
    finally:
        votes.checks.remove(check)
        saving.claim.release()


def _own_table(trained: TrainedModel | None) -> Table:
    if trained is None:
        return {}
    return table_of(trained.model_chunks(), trained.config, trained.stage)


def seal_recorded(saving: Saving) -> None:
    """Mark the folder as complete, once all ranks have voted in ``recorded``; on rank 0 alone.

    Raises:
        OSError: the digest cannot be written.
        TwoSavesError: another save into the folder has begun meanwhile.
    """
    files: Files = {}
    table: Table = dict(saving.content["parameters"])
    for part in digest_parts.read_parts(saving.folder, saving.claim.save):
        files.update(part["files"])
        table.update(part["parameters"])
    saving.claim.finish({**saving.content, "parameters": table, "files": files})
