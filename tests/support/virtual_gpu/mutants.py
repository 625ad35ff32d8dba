"""Wrong calls of torch.distributed in the exchange, on a virtual GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.virtual_gpu.device.nccl import Handle, Launcher, Operation

Launch = Callable[[list[Operation]], Handle | None]
Mutant = Callable[[pytest.MonkeyPatch], None]


def of_launches(change: Callable[[Launch, list[Operation]], Handle | None]) -> Mutant:
    """The mutant in which ``change`` gets each launch and its operations."""
    original = Launcher.launch

    def launch(nccl: Launcher, parts: list[Operation], *args: Any) -> Handle | None:
        return change(lambda own: original(nccl, own, *args), parts)

    @functools.wraps(change)
    def mutant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Launcher, "launch", launch)

    return mutant


@of_launches
def early_free(launch: Launch, parts: list[Operation]) -> Handle | None:
    """What is received goes to memory that is given back at once."""
    elsewhere = [
        dataclasses.replace(part, writes=[torch.empty_like(x) for x in part.writes])
        for part in parts
    ]
    return launch(elsewhere)


@of_launches
def early_read(launch: Launch, parts: list[Operation]) -> Handle | None:
    """What is received is read before the wait."""
    work = launch(parts)
    for part in parts:
        for received in part.writes:
            received.clone()
    return work
