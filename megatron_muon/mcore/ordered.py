"""Giving Megatron a layout of its grad buffers in which shards cut few weights: from core 0.18 on.

Buckets keep their parameters and their sizes; only the order inside a bucket is another one. It
depends on the DP size, so checkpoints of it must be by parameter, as all of Muon's are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_muon.mcore.hooks import megatron_version
from megatron_muon.ordering import shard_order, starts

SINCE = (0, 18)
_NAME = "_compute_per_buffer_param_layout"
_original: Callable[..., Any] | None = None  # None while Megatron's own is in place


def put_in() -> None:
    """Order the parameters of all buckets that are laid out from now on. Idempotent.

    Raises:
        NotImplementedError: this Megatron takes no layout.
    """
    global _original
    text, version = megatron_version()
    if version < SINCE:
        raise NotImplementedError(
            f"align_shards needs megatron-core 0.18 or later, which takes a layout of its buffers; "
            f"here is {text}: leave it out"
        )
    if _original is None:
        _original = getattr(DistributedOptimizer, _NAME)
        setattr(DistributedOptimizer, _NAME, staticmethod(_in_order))


def take_out() -> None:
    """Megatron's own order again."""
    global _original
    if _original is not None:
        setattr(DistributedOptimizer, _NAME, staticmethod(_original))
        _original = None


def _in_order(*args: Any, **kwargs: Any) -> Any:
    """Megatron's layout of one grad buffer, with each bucket's parameters in another order."""
    assert _original is not None
    layout = _original(*args, **kwargs)
    in_bucket: dict[int, list[Any]] = {}
    for param, (_, _, bucket) in layout.param_index_map.items():
        in_bucket.setdefault(bucket, []).append(param)
    places: dict[Any, tuple[int, int, int]] = {}
    unpadded = list(layout.per_bucket_numel_unpadded)
    for bucket, params in in_bucket.items():
        start, stop = layout.bucket_indices[bucket]
        found = _places(params, start, stop, layout.num_optimizer_shards)
        if found is None:
            found = {param: layout.param_index_map[param][:2] for param in params}
        places |= {param: (*span, bucket) for param, span in found.items()}
        last = max(stop for _, stop in found.values())
        unpadded[bucket] = last - layout.bucket_indices[bucket][0]
    return dataclasses.replace(
        layout, param_index_map=places, per_bucket_numel_unpadded=unpadded
    )  # param_indices, which only fp8 needs, are as Megatron numbers its parameters


def _places(
    params: list[Any], start: int, stop: int, shards: int
) -> dict[Any, tuple[int, int]] | None:
    """Each parameter's span, in the order of the buffer; None where it would need more padding."""
    sizes = [param.data.nelement() for param in params]
    order = shard_order(sizes, [_may_be_muons(p) for p in params], (stop - start) // shards)
    found = {
        params[index]: (start + at, start + at + sizes[index])
        for index, at in zip(order, starts(order, sizes), strict=True)
    }
    return found if max(end for _, end in found.values()) <= stop else None


def _may_be_muons(param: Any) -> bool:
    """Without names, which Megatron does not hand over here: nothing but bytes depends on it."""
    return param.dim() > 1 and not getattr(param, "is_embedding_or_output_parameter", False)
