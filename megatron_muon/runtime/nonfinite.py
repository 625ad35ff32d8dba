"""Counts of the steps that left a matrix where it was, since its result was not
finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Left(NamedTuple):
    """Steps that left a matrix where it was."""

    results: int  # all of them
    inputs: int  # those in which what came to the home was not finite either

    def since(self, before: Left | None) -> Left:
        """The steps that are not yet in ``before``."""
        if before is None:
            return self
        return Left(self.results - before.results, self.inputs - before.inputs)


class Nonfinite:
    """Counts such steps for the matrices at home here, on the device.

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
        self._copy = torch.zeros((2, len(self._names)), dtype=torch.int32)
        self._event: Any = None

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
        self._copy = self._counts.to("cpu", non_blocking=True, copy=True)
        if self._counts.device.type != "cpu":  # torch takes pinned memory for the copy
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def left(self, *, waits: bool) -> dict[str, Left]:
        """The matrices that were left, by name.

        Args:
            waits: whether the host waits for the last step. If it does not, the result
                is empty while the device is at work on it.
        """
        if self._event is not None and not self._event.query():
            if not waits:
                return {}
            self._event.synchronize()
        if not self._copy.any():
            return {}
        counts = zip(self._names, *self._copy.tolist(), strict=True)
        return {name: Left(*left) for name, *left in counts if any(left)}
