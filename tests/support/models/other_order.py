"""A Megatron whose buckets have their parameters in another order, as those of earlier
versions of the plugin had.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

ALIGNMENT = 64  # elements; every parameter starts at a multiple of it


@contextmanager
def in_other_order() -> Iterator[None]:
    """Within it each bucket is filled from its last parameter to its first; from core
    0.18 on.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    megatrons = DistributedOptimizer.compute_full_param_layout

    @functools.wraps(megatrons)
    def compute(*args: Any, **kwargs: Any) -> Any:
        whole = megatrons(*args, **kwargs)
        layouts = {key: _turned(layout) for key, layout in whole.layouts.items()}
        return dataclasses.replace(whole, layouts=layouts)

    with mock.patch.object(
        DistributedOptimizer, "compute_full_param_layout", staticmethod(compute)
    ):
        yield


def _turned(layout: Any) -> Any:
    """A layout of one grad buffer, with each bucket's parameters in reverse."""
    places = {}
    unpadded = []
    for number, (first, end) in enumerate(layout.bucket_indices):
        stop = first
        for param, (_, _, bucket) in reversed(layout.param_index_map.items()):
            if bucket == number:
                start = -(-stop // ALIGNMENT) * ALIGNMENT
                stop = start + param.data.nelement()
                places[param] = (start, stop, number)
        assert stop <= end
        unpadded.append(stop - first)
    assert places != layout.param_index_map
    return dataclasses.replace(
        layout, param_index_map=places, per_bucket_numel_unpadded=unpadded
    )
