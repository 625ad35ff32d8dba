"""The training loop around the optimizer, as far as a logging step needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """The values that a training loop gives.

    Attributes:
        step: number of the step under way, counted from 1 and the same on all ranks; None where the
            loop does not say.
        write: takes a step's number and its scalars by name, on the rank that writes.
    """

    step: Callable[[], int | None]
    write: Callable[[int, Mapping[str, float]], None]


def _no_step() -> int | None:
    return None


def _nowhere(step: int, scalars: Mapping[str, float]) -> None:
    pass


NO_HOST = Host(_no_step, _nowhere)
_host = NO_HOST


def set_host(host: Host) -> None:
    """Take steps from this loop, and give it scalars, until ``NO_HOST`` is set again."""
    global _host
    _host = host


def host() -> Host:
    """The loop of this process."""
    return _host
