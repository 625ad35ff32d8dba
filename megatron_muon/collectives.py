"""Every collective that the package calls, and nothing else.

In a step: ``all_to_all`` twice over the stage and ``any_rank`` once over the world. Before the
first step: ``all_gather_numbers`` once over the stage, which also creates its communicator, and
``any_rank`` once over the world. ``all_gather_texts`` runs only to word an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

Group = dist.ProcessGroup


def all_to_all(
    name: str, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int], group: Group
) -> Tensor:
    """Send consecutive runs of ``sent`` to the group's ranks in order; returns what they sent here.

    Args:
        name: of the phase, in traces.
        sent: ``(sum(sent_sizes),)``.
        sent_sizes, received_sizes: elements for and from each rank of the group; 0 is fine.
        group: all its ranks call this together.
    """
    received = sent.new_empty(sum(received_sizes))
    with record_function(name):
        dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), group=group)
    return received


def any_rank(flag: Tensor, group: Group) -> bool:
    """True on every rank of the group if ``flag``, a bool scalar, is True on one."""
    vote = flag.to(torch.int32)
    with record_function("muon/vote"):
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
    return bool(vote.item())


def all_gather_numbers(
    numbers: Sequence[int], group: Group, device: torch.device
) -> list[list[int]]:
    """Every rank's ``numbers`` (64-bit, equally many on all ranks), in the order of the group."""
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return [tensor.tolist() for tensor in every]


def all_gather_texts(text: str, group: Group) -> list[str]:
    """Every rank's ``text``, in the order of the group."""
    texts: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    return cast(list[str], texts)
