"""The training loop around the optimizer, as far as what is logged needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


def _unknown() -> int | None:
    return None


@dataclass(frozen=True, slots=True)
class Host:
    """The values that a training loop gives.

    Attributes:
        step: number of the step under way, counted from 1 and the same on all ranks; None where the
            loop does not say.
        write: takes a step's number and its scalars by name, on the rank that writes.
        log_interval: steps from one line of the loop's log to the next; None where it does not say.
    """

    step: Callable[[], int | None]
    write: Callable[[int, Mapping[str, float]], None]
    log_interval: Callable[[], int | None] = _unknown


def _nowhere(step: int, scalars: Mapping[str, float]) -> None:
    pass


NO_HOST = Host(_unknown, _nowhere)
_host = NO_HOST


def set_host(host: Host) -> None:
    """Take steps from this loop, and give it scalars, until ``NO_HOST`` is set again."""
    global _host
    _host = host


def host() -> Host:
    """The loop of this process."""
    return _host
