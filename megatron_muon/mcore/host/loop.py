"""The training loop around the optimizer: its steps, its log, and what the plugin may
choose for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_muon.planning.buckets import Buckets


class Host:
    """A training loop that tells the plugin nothing; subclasses know more.

    ``leaves_buckets`` says whether the plugin chooses the number of buckets.
    """

    def __init__(self, *, leaves_buckets: bool = False) -> None:
        self.leaves_buckets = leaves_buckets

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

    def take_buckets(self, chosen: Buckets) -> None:
        """Take what is chosen."""


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
