"""Every collective that the package calls, and nothing else.

In a step, for each of Megatron's DistributedOptimizers (one, and one for experts):
``start_messages`` twice per round over the stage; among the homes that share a matrix,
once before its squares, twice for each sum of them, once for each product of which
they make rows, once after them,
and twice where a wide matrix travels as rows; ``any_rank`` over all stages where
Megatron's norm of the gradients is not finite, or not one for all its optimizers. With
a clip of logits ``max_over`` the stage after each step. With block steps
``all_gather_numbers`` over the stage in the first step after a start or a load. Before
a line of the log ``any_rank`` over the world. A logging step has one ``add_up`` over
the world more, ``start_messages`` once more per round, and one ``max_over`` where the
attention keeps its logits.

While the optimizers are built: votes and numbers over the world; numbers over the
stage, which also creates its communicator; ``split_world`` once where there are several
optimizer instances, and once where nothing trains on some ranks.

A rule that asks for sums has one ``add_up`` over the stage per round and point.

Saving and loading vote. ``all_gather_json`` spreads the text of an error, compares
parameter names where patterns route them, and puts a checkpoint's manifest together.

Only ``bench`` and Megatron on a CPU call ``start_broadcasts``.

In what follows ``name`` is that of the phase, for errors and traces. All ranks of
``group`` call a function together; None is the world. ``device`` is the one that the
group communicates from.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import dlpack

from megatron_muon.presence import MuonError
from megatron_muon.runtime.tracing import named_range

Group = dist.ProcessGroup
Counts = Sequence[tuple[int, int]]  # (rank of the group, elements)
Place = tuple[int, int, int]  # rank of the group, start and stop in a buffer

# Errors of this rank's own device. They surface at the host's next call, whatever it
# is, so they are not the collective's. torch 2.4 has the first in torch.cuda; the
# second is new in 2.8.
_OWN_FAULT = (
    torch.cuda.OutOfMemoryError,
    getattr(torch, "AcceleratorError", MemoryError),
)


class PhaseError(MuonError, RuntimeError):
    """A collective failed: most often another rank was stopped or killed, or raised an
    error.
    """


@dataclass(frozen=True, slots=True)
class Pending:
    """Messages that are under way, and references to their buffers until then."""

    name: str
    group: Group
    sent: Tensor
    received: Tensor
    works: Sequence[dist.Work]

    def wait(self) -> Tensor:
        """The received elements. On CUDA the current stream waits, not the host."""
        with marked(self.name, self.group, "wait"):
            for work in self.works:
                work.wait()
        return self.received


@dataclass(frozen=True, slots=True)
class Message:
    """Elements ``[start, stop)`` of a flat buffer, to or from a rank of the world."""

    is_sent: bool
    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Route:
    """The messages of one rank in an exchange, none of them empty."""

    group: Group  # the process group
    # all messages, in the order in which they are started
    messages: tuple[Message, ...]
    # sent: elements of all messages that it sends. received: those of the buffer that
    # is filled
    sent: int
    received: int

    @staticmethod
    def of(
        group: Group,
        world: Sequence[int],
        rank: int,
        sent: Sequence[Place],
        received: Sequence[Place],
    ) -> Route:
        """Messages that send ranges of one buffer, and fill ranges of another one.

        They start in the order of distance between ranks, so that ranks begin with
        different peers. A range of this rank's own has its place, and no message.

        Args:
            world: ``world_ranks(group)``.
            rank: this rank's number in the group.
            sent, received: the ranges by peer, in elements of their buffers.
        """
        placed = []
        for sign, places in ((-1, received), (1, sent)):
            for other, start, stop in places:
                if start < stop and other != rank:
                    distance = sign * (other - rank) % len(world)
                    message = Message(sign > 0, world[other], start, stop)
                    placed.append((distance, message))
        placed.sort(key=lambda pair: (pair[0], pair[1].is_sent))
        messages = tuple(message for _, message in placed)
        return Route(
            group,
            messages,
            sent=sum(each.stop - each.start for each in messages if each.is_sent),
            received=max((stop for _, _, stop in received), default=0),
        )


def consecutive(counts: Counts, multiple: int = 1) -> list[Place]:
    """The places of messages that are one after another in their buffer, and start at
    multiples of ``multiple`` elements.
    """
    places: list[Place] = []
    start = 0
    for rank, count in counts:
        places.append((rank, start, start + count))
        start += -(-count // multiple) * multiple
    return places


def world_ranks(group: Group) -> list[int]:
    """The world ranks of a group, in its order; no communication."""
    return list(dist.get_process_group_ranks(group))


def start_messages(name: str, sent: Tensor, route: Route) -> Pending | None:
    """Start to send ranges of ``sent``, and to receive.

    torch's own all-to-all is not used. With NCCL 2.14 or later it posts a send and a
    receive to every rank, even empty ones. So each call is a barrier of the group. With
    gloo it goes from rank to rank and takes four times as long.

    Returns:
        The messages under way; None where this rank has none.
    """
    if not route.messages:
        return None
    received = sent.new_empty(route.received)
    with marked(name, route.group):
        works = _start_messages(sent, received, route)
    return Pending(name, route.group, sent, received, works)


def _start_messages(sent: Tensor, received: Tensor, route: Route) -> list[dist.Work]:
    if sent.device.type != "cpu":
        # For point-to-point messages torch calls recordStream: it takes a freed buffer
        # again only once the GPU is done with it, long after the host has gone on. It
        # does not do so for memory that it got from elsewhere, and Pending keeps both
        # buffers until the wait.
        sent = dlpack.from_dlpack(sent)
        received = dlpack.from_dlpack(received)
    operations = [
        (
            dist.isend if message.is_sent else dist.irecv,
            (sent if message.is_sent else received)[message.start : message.stop],
            message.rank,
        )
        for message in route.messages
    ]
    started: Sequence[dist.Work | None]
    if sent.device.type == "cpu":
        started = [
            start(tensor, rank, group=route.group) for start, tensor, rank in operations
        ]
    else:  # one launch
        started = dist.batch_isend_irecv(
            [
                dist.P2POp(start, tensor, rank, route.group)
                for start, tensor, rank in operations
            ]
        )
    return [work for work in started if work is not None]


@dataclass(frozen=True, slots=True)
class Broadcasts:
    """Broadcasts that are under way together."""

    name: str
    group: Group
    works: Sequence[dist.Work]

    def wait(self) -> bool:
        """Wait for all of them; True, as ``dist.Work.wait`` returns it."""
        with marked(self.name, self.group, "wait"):
            return all([work.wait() for work in self.works])


def start_broadcasts(
    name: str, tensors: Sequence[Sequence[Tensor]], group: Group
) -> Broadcasts:
    """Start to fill each tensor's r-th range, of any size, with rank r's values.

    torch does the same over NCCL for an all-gather of unequal ranges, which gloo
    refuses.
    """
    with marked(name, group):
        works: list[dist.Work | None] = []
        for parts in tensors:
            for rank, part in enumerate(parts):
                if not part.numel():
                    continue
                source = dist.get_global_rank(group, rank)
                work = dist.broadcast(part, source, group=group, async_op=True)
                works.append(work)
    return Broadcasts(name, group, [work for work in works if work is not None])


def any_rank(name: str, flag: Tensor, group: Group | None) -> bool:
    """True on every rank of the group if ``flag``, a bool scalar, is True on one."""
    vote = flag.to(torch.int32)
    with marked(name, group):
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
        return bool(vote.item())


def add_up(name: str, numbers: Tensor, group: Group | None) -> None:
    """Replace ``numbers``, ``(n,)`` on all ranks, by their sums over the ranks."""
    with marked(name, group):
        dist.all_reduce(numbers, group=group)


def max_over(name: str, numbers: Tensor, group: Group | None) -> None:
    """Replace ``numbers``, ``(n,)`` on all ranks, by the largest of all ranks, one by
    one.
    """
    with marked(name, group):
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)


def all_gather_numbers(
    numbers: Sequence[int], group: Group | None, device: torch.device
) -> list[list[int]]:
    """Every rank's ``numbers``, in the order of the group."""
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with marked("muon/agree", group):
        dist.all_gather(every, mine, group=group)
    return [tensor.tolist() for tensor in every]


def all_gather_json(value: Any, group: Group | None) -> list[Any]:
    """Every rank's ``value``, as JSON gives it back, in the order of the group."""
    packed: list[Any] = [None] * dist.get_world_size(group)
    # packed: a GPU takes the longest text's bytes for every rank
    mine = zlib.compress(json.dumps(value).encode())
    with marked("muon/error", group):
        dist.all_gather_object(packed, mine, group=group)
    return [json.loads(zlib.decompress(text)) for text in packed]


def world_rank(rank: int, group: Group | None) -> int:
    """The world rank of a group's rank; no communication."""
    return rank if group is None else dist.get_global_rank(group, rank)


def split_world(color: Sequence[int], like: Group, device: torch.device) -> Group:
    """A new group of all ranks that give the same color, with the timeout of the group
    ``like``.

    Every rank of the world calls this, with equally many integers.
    """
    timeout = like._get_backend(device).options._timeout
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, other in enumerate(all_gather_numbers(color, None, device)):
        members.setdefault(tuple(other), []).append(rank)
    # every rank makes all groups, in one order
    groups = {
        key: dist.new_group(ranks, timeout=timeout)
        for key, ranks in sorted(members.items())
    }
    group: Group = groups[tuple(color)]
    return group


@contextmanager
def marked(name: str, group: Group | None, part: str = "collective") -> Iterator[None]:
    """Mark a collective in traces, and name its phase in the error if it fails."""
    with naming(name, group), named_range(f"{name}/{part}"):
        yield


@contextmanager
def naming(
    name: str, group: Group | None, what: str = "its collective"
) -> Iterator[None]:
    """Name the phase in the error of a collective.

    gloo raises where another rank is gone or the timeout has passed. NCCL's watchdog
    ends the process instead, and logs the collective by its sequence number.

    Raises:
        PhaseError: names the phase, this rank and ``what`` failed, and quotes the
            error. One that names a phase already, or is of this rank's own device, is
            raised as it is.
    """
    try:
        yield
    except (PhaseError, *_OWN_FAULT):
        raise
    except RuntimeError as error:
        raise PhaseError(
            f"{name}: rank {dist.get_rank(group)} of the group of "
            f"{dist.get_world_size(group)} did not get through {what}. Most often "
            "another rank was stopped or killed or raised an error: look for the first "
            f"error among the ranks' logs ({error})"
        ) from error
