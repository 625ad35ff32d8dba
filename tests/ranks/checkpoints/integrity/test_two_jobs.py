"""Two jobs save into one folder: whoever was told "saved" can be loaded.

Each job stops once, at one of four points of its save, until the other has stopped or
ended: 16 pairs of points. First job 0 runs to its point, then job 1 to its own; then
job 0 runs to its end, and job 1 after it.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_muon.mcore.load_check import digest, files
from megatron_muon.mcore.load_check.save import Saving
from support.checkpoints import sealing
from support.checkpoints.saving import formats, unequal
from support.models.gpt import Case, Topology, held, start, stepped
from support.ranks import RankError, error_of, run

DP2 = Topology(dp=2)
FORMAT = formats()[0]
JOBS = (Case(steps=1), Case(steps=2))
UNMARKED, MARKED, WRITTEN, LOOKED, ENDED = range(5)  # where a job stops
PAIRS = [
    *itertools.product(
        (UNMARKED, MARKED, WRITTEN, LOOKED), (MARKED, WRITTEN, LOOKED, ENDED)
    ),
]
# Without locks: the job that began first has not looked again when the other one ends.
UNSEEN = {(UNMARKED, MARKED), (UNMARKED, WRITTEN), (MARKED, ENDED), (WRITTEN, ENDED)}


@dataclass(frozen=True)
class Job:
    """One of the two jobs, as one of its ranks sees it during the save of a pair."""

    number: int
    stops_at: int
    flags: Path  # of files that say which rank has stopped or ended

    def reach(self, point: int) -> None:
        """At this job's point: let the other job run until it stops or ends."""
        if point != self.stops_at:
            return
        self._say("stopped")
        if self.number == 0:
            self._wait_for_other("stopped", "ended")
        else:
            self._wait_for_other("ended")

    def before_its_save(self) -> None:
        if self.number == 1:
            self._wait_for_other("stopped", "ended")

    def after_its_save(self) -> None:
        """Once both jobs have ended, on all of their ranks."""
        self._say("ended")
        wanted = [
            self.flags / f"{job}.{rank}.ended" for job in (0, 1) for rank in (0, 1)
        ]
        _wait(lambda: all(path.exists() for path in wanted))

    def _say(self, what: str) -> None:
        (self.flags / f"{self.number}.{dist.get_rank()}.{what}").touch()

    def _wait_for_other(self, *any_of: str) -> None:
        other = 1 - self.number
        wanted = [self.flags / f"{other}.0.{what}" for what in any_of]
        _wait(lambda: any(path.exists() for path in wanted))


def _wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not until():
        assert time.monotonic() < end, "the other job does not come"
        time.sleep(0.002)


@contextmanager
def _stopping(job: Job) -> Iterator[None]:
    """Within it a save stops at the job's point."""
    begin, seal, finish = Saving.begin, Saving.seal, Saving._finish

    def begins(*args: Any) -> Saving | None:
        job.reach(UNMARKED)
        saving = begin(*args)
        job.reach(MARKED)
        return saving

    def seals(*args: Any, **kwargs: Any) -> None:
        job.reach(WRITTEN)
        seal(*args, **kwargs)

    def finishes(*args: Any) -> None:
        job.reach(LOOKED)
        finish(*args)

    with (
        mock.patch.object(Saving, "begin", begins),
        mock.patch.object(Saving, "seal", seals),
        mock.patch.object(Saving, "_finish", finishes),
    ):
        yield


def _no_locks(*_: Any) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


def _both_jobs(folder: str, *, locks: bool) -> dict[str, Any]:
    """On 4 ranks: two jobs of 2. By pair, what this rank's save and then a load say."""
    number = dist.get_rank() // 2
    _part_from_the_other_job(number, folder)
    built = stepped(JOBS[number], DP2)
    again = start(JOBS[number], DP2)
    own = held(built)
    pairs = {}
    for pair in PAIRS:
        flags = Path(folder, f"flags_{pair}")
        flags.mkdir(exist_ok=True)
        job = Job(number, pair[number], flags)
        target = str(Path(folder, f"saved_{pair}"))
        job.before_its_save()
        lockf = files.fcntl.lockf if locks else _no_locks
        with _stopping(job), mock.patch.object(files.fcntl, "lockf", lockf):
            save_error = error_of(partial(sealing.save, built, target, FORMAT))
        job.after_its_save()
        load_error = error_of(partial(sealing.load, again, target, FORMAT))
        pairs[pair] = {"save": save_error, "load": load_error, "loaded": held(again)}
    return {"own": own, "pairs": pairs}


def _part_from_the_other_job(number: int, folder: str) -> None:
    """Leave the process group of all ranks for one of this job's ranks."""
    rank = dist.get_rank() % 2
    dist.destroy_process_group()
    rendezvous = Path(folder, f"rendezvous_{number}")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2
    )
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}


def _with_locks(folder: str) -> dict[str, Any]:
    return _both_jobs(folder, locks=True)


def _without_locks(folder: str) -> dict[str, Any]:
    return _both_jobs(folder, locks=False)


def _whose(pair: tuple[int, int], results: list[dict[str, Any]]) -> set[int]:
    """The jobs whose state every rank has loaded; empty where the load is refused.

    A load is refused on all ranks or on none, and what is loaded is one job's, never a
    mix.
    """
    loads = [result["pairs"][pair] for result in results]
    refused = {load["load"] != "no error" for load in loads}
    assert len(refused) == 1, loads
    if refused == {True}:
        return set()
    whose = {
        job
        for job in (0, 1)
        if not any(
            unequal(results[2 * job + rank % 2]["own"], load["loaded"], "", log=False)
            for rank, load in enumerate(loads)
        )
    }
    assert len(whose) == 1, f"{pair}: a mix"
    return whose


def _told(pair: tuple[int, int], results: list[dict[str, Any]]) -> set[int]:
    """The jobs that were told "saved"; the others have an error on both of their
    ranks.
    """
    told = set()
    for job in (0, 1):
        ranks = results[2 * job : 2 * job + 2]
        errors = [result["pairs"][pair]["save"] for result in ranks]
        ended = {error == "no error" for error in errors}
        assert len(ended) == 1, errors
        if ended == {True}:
            told.add(job)
        else:
            assert re.search(
                "another job saves into|files of two|another save has", errors[0]
            )
            assert "Let only one job save there" in errors[1]
    return told


def test_a_save_that_ends_without_an_error_loads(tmp_path: Path) -> None:
    results = run(_with_locks, 4, str(tmp_path), timeout=300.0)
    for pair in PAIRS:
        told = _told(pair, results)
        assert _whose(pair, results) & told, pair
        in_turn = pair == (UNMARKED, ENDED)  # job 1 ends before job 0 begins
        assert len(told) == (2 if in_turn else 1), pair
    left = {path.name for path in tmp_path.rglob("megatron_muon.*")}
    assert left == {digest.FILE_NAME}


def test_without_locks_the_first_of_two_must_have_looked(tmp_path: Path) -> None:
    results = run(_without_locks, 4, str(tmp_path), timeout=300.0)
    refused = set()
    for pair in PAIRS:
        told = _told(pair, results)
        loaded = _whose(pair, results)
        assert loaded <= told, pair
        if told and not loaded:
            refused.add(pair)
    assert refused == UNSEEN


def _dies_before_its_files(case: Case, topology: Topology, folder: str) -> None:
    built = start(case, topology)

    def dies(self: Saving) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Saving, "unlocked_by_an_error", dies):
        sealing.save(built, folder, FORMAT)


def test_a_killed_saves_files_hinder_no_other_save(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="ended with exit code -9"):
        run(_dies_before_its_files, 2, JOBS[0], DP2, str(tmp_path))
    assert (tmp_path / digest.LOCK_NAME).exists()
    run(sealing.saved, 2, JOBS[0], DP2, FORMAT, str(tmp_path))
    assert not (tmp_path / digest.LOCK_NAME).exists()
    for result in run(sealing.loaded, 2, JOBS[0], DP2, FORMAT, str(tmp_path)):
        assert result["error"] is None
