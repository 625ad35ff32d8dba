"""Giving Megatron a layout of its grad buffers in which shards cut few weights: from
core 0.18 on.

Buckets keep their parameters and their sizes; only the order inside a bucket is another
one, where ``order.orders`` finds that less is sent. It depends on the DP size, so
checkpoints of it must be by parameter, as all of Muon's are.

A layout is given to DistributedDataParallel, or made by it, and there the names of
weights are known. Megatron-LM makes layouts before that, which nothing else reads.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_muon.mcore.host.process_groups import Sizes, sharing
from megatron_muon.mcore.host.shards import device_of
from megatron_muon.mcore.routing.routes import routes_of
from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.orthogonalize.matmul import KernelError, numerics_on
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.buckets.order import Bucket, Holders, orders, starts
from megatron_muon.planning.layout import Parameter
from megatron_muon.runtime.patches import Patches, around
from megatron_muon.settings.config import MuonConfig, named

SINCE = (0, 18)
_LAYOUT = "_compute_per_buffer_param_layout"
_patches = Patches()
_config: MuonConfig | None = None  # None while Megatron's own order is in place
# DistributedDataParallel that were made while this is in
_ordered: WeakSet[Any] = WeakSet()
_wrapped: _Model | None = (
    None  # the model that DistributedDataParallel is making a layout of
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """Muon's parameters of a model chunk, without places, and the ranks that have
    them.
    """

    muons: Mapping[Any, Parameter]
    dense: Holders
    experts: Holders
    numerics: Numerics


def takes_layouts() -> bool:
    """Whether the installed Megatron takes a layout of its grad buffers."""
    return megatron_version()[1] >= SINCE


def put_in(config: MuonConfig) -> None:
    """Order the parameters of buckets that are laid out from now on. Idempotent."""
    global _config
    if not takes_layouts():
        raise NotImplementedError(
            f"{named('align_shards')} needs megatron-core 0.18 or later, which takes a "
            f"layout of its buffers; here is {megatron_version()[0]}: leave it out"
        )
    before, _config = _config, config
    if before is None:
        layout, init = (
            getattr(DistributedOptimizer, _LAYOUT),
            DistributedDataParallel.__init__,
        )
        layout = around(layout, _laid_out, _is_in)
        init = around(init, _init, _is_in)
        _patches.set(DistributedOptimizer, _LAYOUT, staticmethod(layout))
        _patches.set(DistributedDataParallel, "__init__", init)


def take_out() -> None:
    """Megatron's own order again."""
    global _config
    _patches.undo()
    _config = None


def _is_in() -> bool:
    return _config is not None


@contextmanager
def as_in_run(config: MuonConfig) -> Iterator[None]:
    """Within it layouts are those of a run with these settings; nothing is installed
    before.
    """
    if config.align_shards:
        put_in(config)
    try:
        yield
    finally:
        take_out()


def require_ordered(model_chunks: Sequence[Any]) -> None:
    """Refuse, by a ValueError, chunks that were wrapped before ``align_shards`` was
    set.
    """
    if not all(chunk in _ordered for chunk in model_chunks):
        raise ValueError(
            f"{named('align_shards')} orders parameters where DistributedDataParallel "
            "lays out their buffers, and here it did before megatron_muon.install(): "
            "install first, or leave it out"
        )


def _init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces DistributedDataParallel's: orders the layout that it makes, or is
    given.
    """
    global _wrapped
    call = inspect.signature(original).bind(self, *args, **kwargs)
    model = _model(call.arguments["module"], call.arguments.get("pg_collection"))
    given = call.arguments.get("full_param_layout")
    if given is not None and model is not None:
        layouts = {
            key: _in_order(layout, model) for key, layout in given.layouts.items()
        }
        call.arguments["full_param_layout"] = dataclasses.replace(
            given, layouts=layouts
        )
    _wrapped = model
    try:
        original(*call.args, **call.kwargs)
    finally:
        _wrapped = None
    _ordered.add(self)


def _laid_out(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Megatron's layout of one grad buffer, ordered where its model is known."""
    layout = original(*args, **kwargs)
    return layout if _wrapped is None else _in_order(layout, _wrapped)


def _model(module: Any, pg_collection: Any) -> _Model | None:
    """None where a weight cannot be routed: the optimizer says so, on all ranks
    together.
    """
    assert _config is not None
    (tp_size, expert_tp_size), (dp_size, expert_dp_size) = sharing(
        module, pg_collection
    )
    sizes = Sizes(tp_size, expert_tp_size)
    try:
        routes = routes_of([module], sizes, _config)
        muons = {
            route.weight.param: route.muon for route in routes if route.muon is not None
        }
        numerics = numerics_on(device_of([module]), _config)
    except (ValueError, NotImplementedError, KernelError):
        return None
    dense = Holders(dp_size, tp_size)
    experts = Holders(expert_dp_size, expert_tp_size)
    return _Model(muons, dense, experts, numerics)


def _in_order(layout: Any, model: _Model) -> Any:
    """A layout of one grad buffer, with each bucket's parameters in another order."""
    in_bucket: list[list[Any]] = [[] for _ in layout.bucket_indices]
    for param, (_, _, number) in layout.param_index_map.items():
        in_bucket[number].append(param)
    buckets = []
    for params, (start, stop) in zip(in_bucket, layout.bucket_indices, strict=True):
        sizes = tuple(param.data.nelement() for param in params)
        buckets.append(Bucket(stop - start, sizes, tuple(map(model.muons.get, params))))
    experts = any(
        not getattr(param, "allreduce", True) for param in layout.param_index_map
    )
    chosen = orders(buckets, model.experts if experts else model.dense, model.numerics)
    places = dict(layout.param_index_map)
    unpadded = list(layout.per_bucket_numel_unpadded)
    for number, (bucket, order) in enumerate(zip(buckets, chosen, strict=True)):
        if order != bucket.own():
            first, _ = layout.bucket_indices[number]
            begun = starts(order, bucket.sizes)
            for index, start in zip(order, begun, strict=True):
                stop = start + bucket.sizes[index]
                places[in_bucket[number][index]] = (first + start, first + stop, number)
            unpadded[number] = begun[-1] + bucket.sizes[order[-1]]
    # as Megatron has them
    in_place = sorted(places.items(), key=lambda item: item[1][0])
    # param_indices, which only fp8 needs, are as Megatron numbers its parameters
    return dataclasses.replace(
        layout, param_index_map=dict(in_place), per_bucket_numel_unpadded=unpadded
    )
