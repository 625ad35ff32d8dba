"""NCCL as a rank alone sees it: launches on a group's stream, the work they give, and
groups.

Each group has one stream, and each pair of ranks another for single sends and receives.
A launch waits for the stream that is current, and ``Work.wait()`` makes the then
current one wait for it.
Source: ``ProcessGroupNCCL.cpp`` of torch 2.4 to 2.13.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from support.virtual_gpu.device.gpu import Gpu
from support.virtual_gpu.device.tensors import VirtualTensor, ranges
from support.virtual_gpu.trace import (
    Group,
    RecordedCollective,
    RecordedMessage,
    WorkWait,
    place,
)

_numbers = itertools.count(1)


@dataclass(slots=True)
class Operation:
    """One operation, alone or in a coalesced group."""

    kind: str
    reads: list[VirtualTensor]
    writes: list[VirtualTensor]
    agreed: tuple[object, ...]
    sends: tuple[RecordedMessage, ...] = ()
    receives: tuple[RecordedMessage, ...] = ()


class Handle:
    """The handle that an asynchronous collective gives its caller."""

    def __init__(self, gpu: Gpu, number: int) -> None:
        self._gpu, self._number = gpu, number

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits, not the host."""
        self._gpu.trace.events.append(WorkWait(self._number, self._gpu.stream))
        return True


@dataclass(slots=True)
class Coalescing:
    """The handle that ``_coalescing_manager`` gives: the work of all that is called
    within it.
    """

    works: list[Handle] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Launcher:
    """Records launches of NCCL over one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._open: list[Operation] | None = None  # of a coalesced group
        self._groups: dict[str, Group] = {}

    def run(
        self, part: Operation, group: Any, async_op: bool, pair: int | None = None
    ) -> Handle | None:
        if self._open is not None:
            self._open.append(part)
            return None
        return self.launch([part], group, async_op, pair)

    def launch(
        self,
        parts: Sequence[Operation],
        group: Any,
        async_op: bool,
        pair: int | None = None,
    ) -> Handle | None:
        """Record one launch; a single send or receive has a stream of its ``pair``."""
        about = self.group(group)
        rank = dist.get_rank(group)
        reads = [tensor for part in parts for tensor in part.reads]
        writes = [tensor for part in parts for tensor in part.writes]
        for tensor in (*reads, *writes):
            if not isinstance(tensor, VirtualTensor):
                raise RuntimeError(
                    f"NCCL takes tensors on cuda, got one on {tensor.device}"
                )
            if not tensor.is_contiguous():
                raise ValueError("NCCL takes contiguous tensors")
        own = f"nccl {about.name}"
        if pair is not None:
            own += f" {min(rank, pair)}-{max(rank, pair)}"
        trace = self.gpu.trace
        number = next(_numbers)
        trace.events.append(
            RecordedCollective(
                kinds=tuple(part.kind for part in parts),
                group=about,
                rank=rank,
                stream=self.gpu.stream,
                own_stream=own,
                asynchronous=async_op,
                reads=ranges(reads),
                writes=ranges(writes),
                agreed=tuple(part.agreed for part in parts if part.agreed),
                recorded=frozenset(
                    tensor.block.number
                    for part in parts
                    for tensor in (*part.reads, *part.writes)
                    if not part.agreed and not tensor.is_foreign
                ),
                sends=tuple(message for part in parts for message in part.sends),
                receives=tuple(message for part in parts for message in part.receives),
                work=number,
                phase=trace.phase,
                place=place(),
            )
        )
        return Handle(self.gpu, number) if async_op else None

    def group(self, group: Any) -> Group:
        group = dist.group.WORLD if group is None else group
        if group.group_name not in self._groups:
            self._groups[group.group_name] = _named(group)
        return self._groups[group.group_name]

    @contextmanager
    def coalescing(
        self, group: Any = None, device: Any = None, async_ops: bool | None = False
    ) -> Iterator[Coalescing]:
        """All calls within it are one launch."""
        if self._open is not None:
            raise RuntimeError("a coalesced group within another")
        manager = Coalescing()
        parts = self._open = []
        try:
            yield manager
        finally:
            self._open = None
        if parts:
            work = self.launch(parts, group, bool(async_ops))
            parts.clear()  # its tensors are the caller's again
            if work is not None:
                manager.works.append(work)


def _named(group: Any) -> Group:
    """A group by its ranks and its number among those of the same ranks: alike on all
    of them.

    Torch's own names are numbers, which differ where a rank passes over others' groups.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    same = [
        int(other.group_name)
        for other, members in dict(distributed_c10d._world.pg_group_ranks).items()
        if tuple(members) == ranks
    ]
    number = sum(name < int(group.group_name) for name in same)
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    said = ",".join(map(str, ranks))
    if len(ranks) > 2 and len(steps) == 1:
        step = steps.pop()
        said = f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return Group(f"{said} #{number}", ranks)


@contextmanager
def alone_as(rank: int, size: int) -> Iterator[Any]:
    """Be ``rank`` of a world of ``size`` without its other ranks; yields the world's
    group.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
