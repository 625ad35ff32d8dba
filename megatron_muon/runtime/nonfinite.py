"""Counts of the steps that skipped a matrix, since its result was not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Skipped(NamedTuple):
    """The steps that skipped a matrix."""

    results: int  # all of them
    inputs: int  # those in which what came to the home was not finite either

    def since(self, before: Skipped | None) -> Skipped:
        """The steps that are not yet in ``before``."""
        if before is None:
            return self
        return Skipped(self.results - before.results, self.inputs - before.inputs)


class HostCopy:
    """A tensor's copy on the host, which does not wait for the device to make it.

    Attributes:
        tensor: its values are there once the copy ``is_ready``.
    """

    def __init__(self, tensor: Tensor) -> None:
        # torch takes pinned memory for it
        self.tensor = tensor.detach().to("cpu", non_blocking=True, copy=True)
        self._event: Any = None
        if tensor.device.type != "cpu":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_ready(self) -> bool:
        """Whether the device has made it."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Have the host wait until the device has made it."""
        if not self.is_ready():
            self._event.synchronize()


class Nonfinite:
    """Counts the steps that skipped a matrix whose home this rank is, on the device.

    After each step the counts are copied to the host, which does not wait for them.

    Args:
        names: of the matrices; strips of one matrix share its name.
        device: of their numbers.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = list(names)
        self._counts = torch.zeros(
            (2, len(self._names)), dtype=torch.int32, device=device
        )
        self._copy: HostCopy | None = None  # of the counts after the last step

    def add(self, rounds: Sequence[tuple[Sequence[Tensor], Tensor]]) -> None:
        """Count a step.

        Args:
            rounds: norms and marks of all matrices (``Round.taken_numbers``).
        """
        if not self._names:
            return
        norms = [norm for some, _ in rounds for norm in some]
        marks = [some for _, some in rounds]
        self._counts.add_(torch.cat([*marks, *norms]).isnan().view(2, -1))
        self._copy = HostCopy(self._counts)

    def skipped(self, *, waits: bool) -> dict[str, Skipped]:
        """In how many steps each matrix was skipped, by name, if in any.

        Args:
            waits: whether the host waits for the last step. If it does not, the result
                is empty while the device is at work on it.
        """
        copy = self._copy
        if copy is None or not (waits or copy.is_ready()):
            return {}
        if waits:
            copy.wait()
        if not copy.tensor.any():
            return {}
        rows = zip(self._names, *copy.tensor.tolist(), strict=True)
        return {name: Skipped(*counts) for name, *counts in rows if any(counts)}
