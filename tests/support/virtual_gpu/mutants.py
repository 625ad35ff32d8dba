"""Wrong calls of torch.distributed in the exchange, on a virtual GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.virtual_gpu.device.nccl import Handle, Launcher, Operation

Launch = Callable[..., Handle | None]


def with_launch(
    patch: pytest.MonkeyPatch, change: Callable[..., Handle | None]
) -> None:
    """``change`` gets the launcher, its own ``launch`` and the operations of each
    launch.
    """
    original: Launch = Launcher.launch

    def launch(self: Launcher, parts: list[Operation], *args: Any) -> Handle | None:
        return change(self, original, parts, *args)

    patch.setattr(Launcher, "launch", launch)


def early_free(patch: pytest.MonkeyPatch) -> None:
    """What is received goes to memory that is given back at once."""

    def change(
        nccl: Launcher, launch: Launch, parts: list[Operation], *args: Any
    ) -> Handle | None:
        elsewhere = [
            dataclasses.replace(part, writes=[torch.empty_like(x) for x in part.writes])
            for part in parts
        ]
        return launch(nccl, elsewhere, *args)

    with_launch(patch, change)


def early_read(patch: pytest.MonkeyPatch) -> None:
    """What is received is read before the wait."""

    def change(
        nccl: Launcher, launch: Launch, parts: list[Operation], *args: Any
    ) -> Handle | None:
        work = launch(nccl, parts, *args)
        for part in parts:
            for received in part.writes:
                received.clone()
        return work

    with_launch(patch, change)
