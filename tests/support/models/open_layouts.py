"""A training loop that leaves the layout of its grad buffers to the plugin, as
Megatron-LM's flags do, and a Megatron whose own buckets are small.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from megatron_muon.mcore.host.loop import NO_HOST, Host, set_host
from megatron_muon.planning.buckets import count, layout
from megatron_muon.planning.buckets.layout import Layout

STOCK = 2_000  # elements


class OpenLoop(Host):
    """Leaves these layouts to choose from, and keeps what is chosen."""

    def __init__(self, layouts: tuple[str, ...] = ("contiguous",)) -> None:
        self._layouts = layouts
        self.taken: list[Layout] = []

    def layouts(self) -> tuple[str, ...]:
        return self._layouts

    def take_layout(self, layout: Layout) -> None:
        self.taken.append(layout)


@contextmanager
def layouts_open(layouts: tuple[str, ...] = ("contiguous",)) -> Iterator[OpenLoop]:
    """Within it models are built in such a loop."""
    loop, stock = OpenLoop(layouts), {"stock_bucket_size": lambda dp_size: STOCK}
    set_host(loop)
    try:
        with mock.patch.multiple(count, **stock), mock.patch.multiple(layout, **stock):
            yield loop
    finally:
        set_host(NO_HOST)
