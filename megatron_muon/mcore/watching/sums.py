"""Sums over the elements that a rank holds, and the message that they are added to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

AT_ONCE = 1 << 22  # elements of a product in fp32; its sum goes on in fp64


class StepSums:
    """This rank's sums of a logging step, put together in one tensor.

    Args:
        size: number of sums.
        device: the device that they are sent from.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._places: list[int] = []
        self._values: list[Tensor] = []

    def add(self, place: int, value: Tensor | float) -> None:
        """Add a scalar to the sum at ``place``; on a GPU it is still being computed."""
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=torch.float64)
        self._places.append(place)
        self._values.append(value)

    def total(self) -> Tensor:
        """``(size,)`` fp64."""
        total = torch.zeros(self._size, dtype=torch.float64, device=self._device)
        for device in sorted({value.device.type for value in self._values}):
            here = [at for at, value in enumerate(self._values) if value.device.type == device]
            values = torch.stack([self._values[at].double() for at in here])
            places = torch.tensor([self._places[at] for at in here])
            total.index_add_(0, places.to(self._device), values.to(self._device))
        return total


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Σ first × second in fp64, a scalar; ``(n,)`` each, of any floating dtypes."""
    total = torch.zeros((), dtype=torch.float64, device=first.device)
    for a, b in _cut(first, second):
        a, b = a.float(), b.float()
        total += torch.dot(a, b)
    return total


def _cut(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    yield from zip(*(torch.split(tensor, AT_ONCE) for tensor in tensors), strict=True)
