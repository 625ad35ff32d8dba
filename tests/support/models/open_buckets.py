"""A training loop that leaves the number of buckets to the plugin, as Megatron-LM's
flags do, and a Megatron whose own buckets are small.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from megatron_muon.mcore.host.loop import NO_HOST, Host, set_host
from megatron_muon.planning import buckets
from megatron_muon.planning.buckets import Buckets

STOCK = 2_000  # elements


class OpenLoop(Host):
    """Keeps what is chosen."""

    def __init__(self) -> None:
        super().__init__(leaves_buckets=True)
        self.taken: list[Buckets] = []

    def take_buckets(self, chosen: Buckets) -> None:
        self.taken.append(chosen)


@contextmanager
def buckets_open() -> Iterator[OpenLoop]:
    """Within it models are built in such a loop."""
    loop = OpenLoop()
    set_host(loop)
    try:
        with mock.patch.object(buckets, "stock_bucket_size", lambda dp_size: STOCK):
            yield loop
    finally:
        set_host(NO_HOST)
