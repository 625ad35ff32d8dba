"""Every collective that the package calls, and nothing else.

In a step: ``any_rank`` once over all stages, then ``start_all_to_all`` twice a round over the stage
for each of Megatron's DistributedOptimizers (one, and one for experts). While they are built, votes
and numbers go over the world, numbers over the stage, which also creates its communicator, and
``split_world`` once where there are several optimizer instances and once where on some ranks
nothing trains. Saving and loading vote; ``all_gather_texts`` words an error, compares names where
patterns decide, and puts a checkpoint's digest together. ``all_gather_flat`` is of what
``megatron-muon bench step`` compares with, ``start_broadcasts`` too and of Megatron on a CPU;
``megatron-muon bench speeds`` times ``start_all_to_all``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

Group = dist.ProcessGroup

# Errors of this rank's own device, which surface wherever the host looks next. torch 2.4 has the
# first in torch.cuda, 2.8 is the first to have the second.
_OWN_FAULT = (torch.cuda.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError))


class PhaseError(RuntimeError):
    """A collective did not come about: another rank was stopped or killed, or raised."""


@dataclass(frozen=True, slots=True)
class Pending:
    """An all-to-all that is under way; what it sends and receives is kept until ``wait``."""

    name: str
    group: Group
    sent: Tensor
    received: Tensor
    works: Sequence[dist.Work]

    def wait(self) -> Tensor:
        """What the ranks sent here. On CUDA the current stream waits, not the host."""
        with _named(self.name, self.group, "wait"):
            for work in self.works:
                work.wait()
        return self.received


def start_all_to_all(
    name: str, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int], group: Group
) -> Pending:
    """Send consecutive runs of ``sent`` to the group's ranks in order.

    Args:
        name: of the phase, in errors and traces.
        sent: ``(sum(sent_sizes),)``.
        sent_sizes, received_sizes: elements for and from each rank of the group; 0 is fine.
        group: all its ranks call this together, and wait in the order of the calls.
    """
    received = sent.new_empty(sum(received_sizes))
    with _named(name, group):
        works = _start_messages(sent, sent_sizes, received, received_sizes, group)
    return Pending(name, group, sent, received, works)


def _start_messages(
    sent: Tensor,
    sent_sizes: Sequence[int],
    received: Tensor,
    received_sizes: Sequence[int],
    group: Group,
) -> list[dist.Work]:
    """An all-to-all among those who have something to share; nobody waits for another.

    torch's own posts a send and a receive to every rank, empty ones too (over NCCL since 2.14), so
    that each is a barrier of the group; gloo's goes from rank to rank and takes four times as long.
    """
    here, size = group.rank(), group.size()
    sends = torch.split(sent, list(sent_sizes))
    receives = torch.split(received, list(received_sizes))
    if sends[here].numel():
        receives[here].copy_(sends[here])
    messages: list[tuple[bool, Tensor, int]] = []  # whether it is sent, what, the other's rank
    for distance in range(1, size):
        source, target = (here - distance) % size, (here + distance) % size
        if received_sizes[source]:
            messages.append((False, receives[source], dist.get_global_rank(group, source)))
        if sent_sizes[target]:
            messages.append((True, sends[target], dist.get_global_rank(group, target)))
    started: list[dist.Work | None] = []
    if sent.device.type == "cpu":
        for is_sent, tensor, rank in messages:
            start = dist.isend if is_sent else dist.irecv
            started.append(start(tensor, rank, group=group))
    elif messages:  # one launch
        operations = [
            dist.P2POp(dist.isend if is_sent else dist.irecv, tensor, rank, group)
            for is_sent, tensor, rank in messages
        ]
        started += dist.batch_isend_irecv(operations)
    return [work for work in started if work is not None]


def all_gather_flat(name: str, mine: Tensor, group: Group) -> list[Tensor]:
    """Every rank's ``mine``, ``(n,)`` with one n, in the order of the group."""
    flat = mine.new_empty(mine.numel() * group.size())
    with _named(name, group):
        dist.all_gather_into_tensor(flat, mine, group=group)
    return list(torch.split(flat, mine.numel()))


@dataclass(frozen=True, slots=True)
class Broadcasts:
    """Broadcasts that are under way together."""

    name: str
    group: Group
    works: Sequence[dist.Work]

    def wait(self) -> bool:
        """True once all are done, as ``dist.Work`` says it."""
        with _named(self.name, self.group, "wait"):
            return all([work.wait() for work in self.works])


def start_broadcasts(name: str, tensors: Sequence[Sequence[Tensor]], group: Group) -> Broadcasts:
    """Start to fill ``parts[r]`` of each of ``tensors`` with what rank r has there: what NCCL makes
    of an all-gather of unequal parts, which gloo refuses.

    Args:
        name: of the phase, in errors and traces.
        tensors: each in parts of any size, one a rank.
        group: all its ranks call this together.
    """
    with _named(name, group):
        works: list[dist.Work | None] = [
            dist.broadcast(part, dist.get_global_rank(group, rank), group=group, async_op=True)
            for parts in tensors
            for rank, part in enumerate(parts)
            if part.numel()
        ]
    return Broadcasts(name, group, [work for work in works if work is not None])


def any_rank(name: str, flag: Tensor, group: Group | None) -> bool:
    """True on every rank of the group if ``flag``, a bool scalar, is True on one.

    Args:
        name: of the phase.
        flag: on the device that the group communicates from.
        group: all its ranks call this together; None for the world.
    """
    vote = flag.to(torch.int32)
    with _named(name, group):
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
        return bool(vote.item())


def all_gather_numbers(
    numbers: Sequence[int], group: Group | None, device: torch.device
) -> list[list[int]]:
    """Every rank's ``numbers`` (64-bit, equally many on all ranks), in the order of the group.

    Args:
        group: None for the world.
    """
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with _named("muon/agree", group):
        dist.all_gather(every, mine, group=group)
    return [tensor.tolist() for tensor in every]


def all_gather_texts(text: str, group: Group | None) -> list[str]:
    """Every rank's ``text``, in the order of the group; None is the world."""
    texts: list[object] = [None] * dist.get_world_size(group)
    with _named("muon/error", group):
        dist.all_gather_object(texts, text, group=group)
    return cast(list[str], texts)


def world_rank(rank: int, group: Group | None) -> int:
    """The rank in the world of a group's rank; no communication."""
    return rank if group is None else dist.get_global_rank(group, rank)


def split_world(color: Sequence[int], like: Group, device: torch.device) -> Group:
    """A new group of all ranks that give the same color; every rank of the world calls this.

    Args:
        color: integers, equally many on all ranks.
        like: the new groups have its timeout.
        device: that the groups communicate from.
    """
    timeout = like._get_backend(device).options._timeout
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, other in enumerate(all_gather_numbers(color, None, device)):
        members.setdefault(tuple(other), []).append(rank)
    mine: Group | None = None
    for key, ranks in sorted(members.items()):  # every rank makes all groups, in one order
        group = dist.new_group(ranks, timeout=timeout)
        mine = group if key == tuple(color) else mine
    assert mine is not None
    return mine


@contextmanager
def _named(name: str, group: Group | None, part: str = "collective") -> Iterator[None]:
    """Mark the collective in traces, and say which it was where it fails.

    gloo raises where another rank is gone or the timeout has passed; NCCL's watchdog ends the
    process instead, and logs the collective by its sequence number.
    """
    try:
        with record_function(f"{name}/{part}"):
            yield
    except _OWN_FAULT:
        raise
    except RuntimeError as error:
        raise PhaseError(
            f"{name}: rank {dist.get_rank(group)} of the group of {dist.get_world_size(group)} did "
            "not get through its collective. Most often another rank was stopped or killed or "
            f"raised an error: look for the first error among the ranks' logs ({error})"
        ) from error
