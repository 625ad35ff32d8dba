"""Other orders of events than gloo's usual one, as context managers for
``gpt.train``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_muon.runtime import collectives

MOST_MS = 20  # that a rank is delayed by, before each of its exchanges


@contextmanager
def late() -> Iterator[None]:
    """Within it a message is sent and received at its wait, no earlier, after a random
    delay.

    Until then the receiver's buffer holds NaN, and what is sent may still change.
    """
    delays = random.Random(dist.get_rank())
    start = collectives._start_messages

    def start_late(sent: Tensor, received: Tensor, route: Any) -> Sequence[Any]:
        received.fill_(torch.nan)

        def messages() -> None:
            arriving = torch.empty_like(received)
            time.sleep(delays.uniform(0, MOST_MS) / 1000)
            for work in start(sent, arriving, route):
                work.wait()
            received.copy_(arriving)

        return [_Work(messages)]

    with mock.patch.object(collectives, "_start_messages", start_late):
        yield


@contextmanager
def early() -> Iterator[None]:
    """Within it a message has come when its start returns, and what was sent holds NaN
    then.
    """
    delays = random.Random(dist.get_rank())
    start = collectives._start_messages

    def start_early(sent: Tensor, received: Tensor, route: Any) -> Sequence[Any]:
        time.sleep(delays.uniform(0, MOST_MS) / 1000)
        for work in start(sent, received, route):
            work.wait()
        sent.fill_(torch.nan)
        return []

    with mock.patch.object(collectives, "_start_messages", start_early):
        yield


@contextmanager
def late_gathers() -> Iterator[None]:
    """Within it Megatron's parameters are gathered at the wait, no earlier, after a
    random delay.

    Until then what others send is NaN here, and all of it must keep its memory.
    """
    delays = random.Random(dist.get_rank())
    start = collectives.start_broadcasts

    def start_late(name: str, tensors: Sequence[Sequence[Tensor]], group: Any) -> Any:
        for part in (
            part
            for parts in tensors
            for i, part in enumerate(parts)
            if i != group.rank()
        ):
            part.fill_(torch.nan)

        def gather() -> None:
            time.sleep(delays.uniform(0, MOST_MS) / 1000)
            for part in (part for parts in tensors for part in parts):
                assert part.untyped_storage().size(), "memory under way was given back"
            start(name, tensors, group).wait()

        return _Work(gather)

    with mock.patch.object(collectives, "start_broadcasts", start_late):
        yield


@contextmanager
def read_before_the_wait() -> Iterator[None]:
    """A mutant: what comes is read when the wait begins."""
    wait = collectives.Pending.wait

    def read_first(pending: collectives.Pending) -> Tensor:
        read = pending.received.clone()
        wait(pending)
        return read

    with late(), mock.patch.object(collectives.Pending, "wait", read_first):
        yield


@contextmanager
def sent_is_used_again() -> Iterator[None]:
    """A mutant: the memory of a message that is under way is written to."""
    start = collectives.start_messages

    def start_and_write(name: str, sent: Tensor, route: Any) -> Any:
        pending = start(name, sent, route)
        if name != "muon/connect":
            sent.mul_(-1.0)
        return pending

    with late(), mock.patch.object(collectives, "start_messages", start_and_write):
        yield


class _Work:
    """A ``dist.Work`` that does all at its wait."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def wait(self) -> bool:
        self._act()
        return True
