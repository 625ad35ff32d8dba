"""Tensors of rounds in host memory: each comes to the device before its use, and goes
back after.

Copies run on two streams, one in each direction, beside the stream that computes. Each
has pinned memory on one side, so the host waits for none of them. Memory on the device
is that stream's: a copy to it waits until what used it before is done, and it is freed
when that stream has waited for the copy from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Name = tuple[int, str]  # number of the round, and the kind of state


class HostMemory:
    """Tensors that live on the host and visit the device.

    Visits are the same in each step and in one order, which the first step shows. From
    then on, the ones that follow are on their way early: up to the next of the leading
    kind.

    Args:
        device: that of the visits.
        leading: the kind of state that a round needs first.
    """

    def __init__(self, device: torch.device, leading: str) -> None:
        self._device, self._leading = device, leading
        self._homes: dict[Name, Tensor] = {}
        self._staying: dict[Name, Tensor] = {}
        self._here: dict[Name, tuple[Tensor, Any]] = {}  # and the event of its arrival
        self._leaving: list[tuple[Tensor, Any]] = []  # and the event of its copy's end
        self._visited: list[Name] = []  # in this step
        self._order: list[Name] = []  # of a step
        stream: Any = torch.cuda.Stream
        self._incoming = stream(device)
        self._outgoing = stream(device)

    def add(self, name: Name, size: int, dtype: torch.dtype, *, on_host: bool) -> None:
        """Keep a flat tensor of zeros by that name from now on."""
        if on_host:
            self._homes[name] = torch.zeros(
                size, dtype=dtype, device="cpu"
            ).pin_memory()
        else:
            self._staying[name] = torch.zeros(size, dtype=dtype, device=self._device)

    def begin(self) -> None:
        """A step begins; what one that raised has left on its way is waited for and
        forgotten.
        """
        if self._visited:
            self._incoming.synchronize()
            self._outgoing.synchronize()
            self._visited.clear()
            self._here.clear()
            self._leaving.clear()

    def at(self, name: Name) -> Tensor:
        """The tensor: on the device during its visit, else at home, once no copy is
        under way.
        """
        if name in self._staying:
            return self._staying[name]
        if name in self._here:
            return self._here[name][0]
        self._outgoing.synchronize()
        return self._homes[name]

    @contextmanager
    def visiting(self, name: Name) -> Iterator[None]:
        """A context in which the tensor of that name is on the device, to be changed.

        A name without a tensor has no effect.
        """
        if name not in self._homes:
            yield
            return
        computing = torch.cuda.current_stream(self._device)
        self._visited.append(name)
        if name[1] != self._leading:
            # what left before the last products has been copied while they ran
            self._free()
        self._fetch(name)
        computing.wait_event(self._here[name][1])
        if name[1] == self._leading:
            self._fetch_following()
        yield
        self._outgoing.wait_stream(computing)
        with torch.cuda.stream(self._outgoing):
            here, _ = self._here.pop(name)
            self._homes[name].copy_(here, non_blocking=True)
            self._leaving.append((here, self._outgoing.record_event()))
        if len(self._visited) == len(self._homes):
            self._order, self._visited = self._visited, []
            self._free()

    def _fetch_following(self) -> None:
        for name in self._order[len(self._visited) :]:
            self._fetch(name)
            if name[1] == self._leading:
                return

    def _fetch(self, name: Name) -> None:
        if name in self._here:
            return
        here = torch.empty_like(self._homes[name], device=self._device)
        self._incoming.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._incoming):
            here.copy_(self._homes[name], non_blocking=True)
            self._here[name] = here, self._incoming.record_event()

    def _free(self) -> None:
        computing = torch.cuda.current_stream(self._device)
        for _, gone in self._leaving:
            computing.wait_event(gone)
        self._leaving.clear()
