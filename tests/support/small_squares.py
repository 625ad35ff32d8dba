"""From which size on homes of shared matrices make rows of squares, as a test asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args
from unittest import mock

from megatron_muon.lab.pricing import strips
from megatron_muon.orthogonalize import iteration
from megatron_muon.orthogonalize.numerics import Device


@contextmanager
def rows_of_small_squares(least: int = 16) -> Iterator[None]:
    """For matrices whose short side is ``least`` or more, on every device, with any
    strips.
    """
    table = dict.fromkeys(get_args(Device), ((range(2, 64), least),))
    caches = (
        iteration.makes_rows,
        iteration.strip_flops,
        strips.newton_schulz_strip,
    )
    with mock.patch.object(iteration, "_BY_ROWS", table):
        for cached in caches:
            cached.cache_clear()
        try:
            yield
        finally:
            for cached in caches:
                cached.cache_clear()
