"""Two jobs, each a world of its own, that save into one folder at chosen moments; on ranks.

A job stops where it opens a certain file for writing (``sys.addaudithook``), and goes on when a
file of signals is there.
"""

from __future__ import annotations

import errno
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT = 60.0  # seconds for a signal to come
SHARDS, HASH, SEAL, PART = "shards", "hash", "seal", "part"
PUT, CLEAR = "put", "clear"  # its mark is put in place; others' files are cleared away
LOOK = "look"  # at the mark, in a process of a save in the background


@dataclass(frozen=True)
class Job:
    """What a job does.

    Attributes:
        name: of its signals ``NAME at POINT`` and ``NAME done``.
        after: the signal that it starts after; "" at once.
        stops: by point, the signal that it goes on after; "" at once.
        background: an asynchronous save, during which rank 0 waits for this signal.
        jitter: seconds that it waits at most at each point; where there are no stops.
    """

    name: str
    after: str = ""
    stops: Mapping[str, str] = field(default_factory=dict)
    background: str = ""
    jitter: float = 0.0


@dataclass(frozen=True)
class Meeting:
    """Both jobs, of ``tp`` x ``dp`` ranks each.

    Attributes:
        folder: that both save into.
        signals: the folder of the signals.
        locks: the file system has them.
    """

    jobs: tuple[Job, Job]
    folder: str
    signals: str
    format: str
    tp: int = 1
    dp: int = 2
    locks: bool = True
    seed: int = 0


class Stops:
    """An audit hook, which cannot be removed, so it is switched."""

    job: Job | None = None
    signals: Path
    random: random.Random
    tmps = 0
    pid = 0  # of the rank
    everywhere = True  # jitter at the marks, too, which keeps most of the two apart
    added = False

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.job is None:
            return
        point = self._point(event, args)
        if point is None:
            return
        if self.job.jitter and (self.everywhere or point not in (PUT, CLEAR, LOOK)):
            time.sleep(self.random.uniform(0, self.job.jitter))
        if point in self.job.stops:
            say(self.signals, f"{self.job.name} at {point}")
            if self.job.stops[point]:
                wait(self.signals, self.job.stops[point])

    def _point(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event == "pathlib.Path.glob" and args[1] == "megatron_muon.*":
            return CLEAR
        if event == "os.rename" and Path(args[1]).name == "megatron_muon.json":
            return PUT
        if event != "open" or not isinstance(args[0], (str, os.PathLike)):
            return None
        path = Path(args[0])
        if path.parent == self.signals:
            return None
        return self._opened(path.name, bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR)))

    def _opened(self, name: str, writes: bool) -> str | None:
        if name.endswith(".distcp"):
            return SHARDS if writes else HASH
        if name.startswith("megatron_muon.json") and writes:
            self.tmps += 1
            return SEAL if self.tmps == 2 else None
        if name == "megatron_muon.json" and os.getpid() != self.pid:
            return LOOK
        return PART if "part.json" in name and writes else None


STOPS = Stops()


def say(signals: Path, signal: str) -> None:
    (signals / signal).touch()


def wait(signals: Path, signal: str) -> None:
    end = time.monotonic() + LIMIT
    while not (signals / signal).exists():
        assert time.monotonic() < end, f"no signal {signal!r} came"
        time.sleep(0.01)


@contextmanager
def without_locks() -> Iterator[None]:
    """As on a file system that has none."""
    from unittest import mock

    from megatron_muon.files import claim

    refused = OSError(errno.ENOTSUP, "Operation not supported")
    with mock.patch.object(claim.fcntl, "flock", side_effect=refused):
        yield


def meet(meeting: Meeting) -> dict[str, Any]:
    """Of one rank of either job: whose it is, its process, and what its save raised."""
    import torch.distributed as dist

    size = meeting.tp * meeting.dp
    number, rank = divmod(dist.get_rank(), size)
    job = meeting.jobs[number]
    dist.barrier()  # one that leaves early would end the others' making of it
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "SLURM_JOB_ID": f"job-{job.name}"}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting.signals}/store{number}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=2 * LIMIT),
    )
    return {"job": job.name, "pid": os.getpid(), "error": _error(meeting, job, number, rank)}


def _error(meeting: Meeting, job: Job, number: int, rank: int) -> str | None:
    import torch.distributed as dist

    from megatron_muon.files import claim
    from support.checkpoints import sealing
    from support.checkpoints.killed_ranks import fill
    from support.models.gpt import Case, Topology, start

    claim.WAIT = 0.3
    built = start(Case(), Topology(tp=meeting.tp, dp=meeting.dp))
    fill(built, number + 1)
    signals = Path(meeting.signals)
    if job.after:
        wait(signals, job.after)
    dist.barrier()
    STOPS.signals, STOPS.tmps, STOPS.pid = signals, 0, os.getpid()
    STOPS.everywhere = meeting.seed % 2 == 1
    STOPS.random = random.Random(meeting.seed * 100 + number * 10 + rank)
    if not STOPS.added:
        sys.addaudithook(STOPS.hook)
        STOPS.added = True
    try:
        with nullcontext() if meeting.locks else without_locks():
            STOPS.job = job
            if job.background:
                _save_in_background(built, meeting, job, signals)
            else:
                sealing.save(built, meeting.folder, meeting.format)
    except Exception as error:
        _leave(meeting, number, rank)
        return f"{type(error).__name__}: {error}"
    finally:
        STOPS.job = None
        if rank == 0:
            say(signals, f"{job.name} done")
    return None


def _leave(meeting: Meeting, number: int, rank: int) -> None:
    """As the process of a rank that has failed ends: others that wait for it, in Megatron's own
    collectives among them, hear of it."""
    import torch.distributed as dist

    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting.signals}/alone{number}.{rank}",
        rank=0,
        world_size=1,
    )


def _save_in_background(built: Any, meeting: Meeting, job: Job, signals: Path) -> None:
    from support.checkpoints import saving, sealing

    def meanwhile() -> None:
        say(signals, f"{job.name} at background")
        wait(signals, job.background)

    with sealing.plugin(built):
        saving.save(built, meeting.folder, meeting.format, meanwhile=meanwhile)


def whose(meeting: Meeting) -> list[str]:
    """Loads the folder with its digest: of which jobs all tensors are; or what the load raised."""
    from torch.distributed.checkpoint.api import CheckpointException

    from support.checkpoints import saving, sealing
    from support.checkpoints.killed_ranks import differences
    from support.models.gpt import Case, Topology, start

    built = start(Case(), Topology(tp=meeting.tp, dp=meeting.dp))
    saving.spoil(built)
    try:
        sealing.load(built, meeting.folder, meeting.format)
    except (Exception, CheckpointException) as error:
        return [f"{type(error).__name__}: {error}"]
    return [job.name for n, job in enumerate(meeting.jobs, 1) if not differences(built, n)]
