"""The training loop around the optimizer, as far as what is logged needs it."""

from __future__ import annotations

from collections.abc import Mapping


class Host:
    """A training loop, as far as it is known; of this one nothing is."""

    def step(self) -> int | None:
        """The number of the step under way, from 1 and the same on all ranks; None: not
        known.
        """
        return None

    def log_interval(self) -> int | None:
        """Steps from one line of the loop's log to the next; None: not known."""
        return None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a step's scalars by name, on the rank that writes."""


NO_HOST = Host()
_host = NO_HOST


def set_host(host: Host) -> None:
    """Take steps from this loop, and give it scalars, until ``NO_HOST`` is set
    again.
    """
    global _host
    _host = host


def host() -> Host:
    """The loop of this process."""
    return _host
