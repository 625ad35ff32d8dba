"""The layout of Megatron's grad buffers: how many buckets they have, and in which order
parameters lie in a bucket.

Both are chosen where DistributedDataParallel is built, from the parameters of its
model, be it a GPT, a hybrid or a fork's: there their names are known, and no buffer is
made yet. A number of buckets is chosen where the training loop leaves it to the plugin
(``Host.leaves_buckets``). It concerns the first model chunk of the first pipeline stage
alone: Megatron cuts no other into buckets. The ranks of that stage choose without
communication. If two choose differently, the comparison of their plans names the first
parameter that lies elsewhere, before the first step.

From core 0.18 on, ``align_shards`` reorders the parameters of a bucket such that shards
cut few weights, where ``order.orders`` finds that less is sent. The order depends on
the DP size, so checkpoints of it must be by parameter, as all of Muon's are.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_muon.mcore.host.loop import Host, host, set_host
from megatron_muon.mcore.host.process_groups import Sizes, group_of, holders_of
from megatron_muon.mcore.host.shards import device_of
from megatron_muon.mcore.routing.routes import routes_of
from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.orthogonalize.matmul import KernelError, numerics_on
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.buckets.count import (
    Buckets,
    Buffer,
    LocalParameter,
    choose_buckets,
    stock_bucket_size,
)
from megatron_muon.planning.buckets.order import Bucket, Holders, orders, starts
from megatron_muon.planning.layout import Parameter
from megatron_muon.runtime.patches import Function, Patches
from megatron_muon.settings.config import MuonConfig, named

SINCE = (0, 18)
# each DistributedDataParallel that was built with ``align_shards``
_ordered: WeakSet[Any] = WeakSet()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A model chunk whose DistributedDataParallel is being built."""

    params: list[torch.nn.Parameter]  # those that train, in Megatron's order
    muons: Mapping[Any, Parameter]  # Muon's of them, without places
    # the ranks that have a buffer of dense weights, and one of experts' weights
    holders: tuple[Holders, Holders]
    numerics: Numerics

    def buffers(self) -> list[Buffer]:
        """The grad buffers that Megatron will make, those of experts last.

        An embedding that is tied across stages counts as part of the bucket before it.
        Megatron gives it a bucket of its own, whose gradients are ready as late.
        """
        weights: dict[tuple[bool, Any, Any], list[LocalParameter]] = {}
        for param in self.params:
            # parameters in fp8 are of a class of their own
            key = is_experts(param), param.dtype, type(param)
            weight = LocalParameter(param.numel(), self.muons.get(param))
            weights.setdefault(key, []).append(weight)
        return [
            Buffer(tuple(weights[key]), self.holders[key[0]])
            for key in sorted(weights, key=lambda key: key[0])
        ]


def is_experts(param: torch.nn.Parameter) -> bool:
    """Whether Megatron puts a parameter into a buffer of experts' weights."""
    return not getattr(param, "allreduce", True)


def takes_layouts() -> bool:
    """Whether the installed Megatron takes a layout of its grad buffers."""
    return megatron_version()[1] >= SINCE


def require_taken() -> None:
    """Refuse ``align_shards``, by a NotImplementedError, on an older Megatron."""
    if not takes_layouts():
        raise NotImplementedError(
            f"{named('align_shards')} needs megatron-core 0.18 or later, which takes a "
            f"layout of its buffers; here is {megatron_version()[0]}: leave it out"
        )


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


@contextmanager
def as_in_run(config: MuonConfig, loop: Host) -> Iterator[None]:
    """A context in which buffers are laid out as in a run with these settings and loop.

    Nothing may be installed before.
    """
    patches = Patches()
    before = host()
    ours = partial(build, config)
    patches.wrap("megatron.core.distributed", "DistributedDataParallel.__init__", ours)
    set_host(loop)
    try:
        yield
    finally:
        set_host(before)
        patches.undo()


def build(
    config: MuonConfig,
    original: Function,
    ddp: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Call DistributedDataParallel's own ``__init__`` with the layout of this run."""
    call = inspect.signature(original).bind(ddp, *args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    model = _chunk(given["module"], given.get("pg_collection"), config)
    chosen = Buckets()
    if host().leaves_buckets() and _may_be_cut(given):
        if model is not None and group_of("pp", given.get("pg_collection")).rank() == 0:
            chosen = choose_buckets(model.buffers())
        host().take_buckets(chosen)
    if model is not None:
        _lay_out(given, model, chosen)
    original(*call.args, **call.kwargs)
    if config.align_shards:
        _ordered.add(ddp)


def _chunk(module: Any, pg_collection: Any, config: MuonConfig) -> _Chunk | None:
    """None where a weight cannot be routed: the optimizer says so, on all ranks
    together.
    """
    holders = dense, experts = holders_of(module, pg_collection)
    try:
        routes = routes_of([module], Sizes(dense.tp_size, experts.tp_size), config)
        numerics = numerics_on(device_of([module]), config)
    except (ValueError, NotImplementedError, KernelError):
        return None
    params = [param for param in module.parameters() if param.requires_grad]
    muons = {route.weight.param: route.muon for route in routes if route.muon}
    return _Chunk(params, muons, holders, numerics)


def _may_be_cut(given: Mapping[str, Any]) -> bool:
    """Whether Megatron cuts a chunk into buckets if its stage is the first."""
    return given["ddp_config"].overlap_grad_reduce and not given["disable_bucketing"]


def _lay_out(given: dict[str, Any], model: _Chunk, chosen: Buckets) -> None:
    """Put the layout into the arguments of DistributedDataParallel's ``__init__``."""
    ddp_config = given["ddp_config"]
    whole = given.get("full_param_layout")
    if chosen.number is not None:
        elements = sum(param.numel() for param in model.params)
        ddp_config.bucket_size = elements // chosen.number
        if whole is not None:
            whole = _megatrons(given, model)
    is_ordered = model.numerics.config.align_shards
    if is_ordered and ddp_config.use_distributed_optimizer:
        whole = whole or _megatrons(given, model)
        layouts = {key: _in_order(one, model) for key, one in whole.layouts.items()}
        whole = dataclasses.replace(whole, layouts=layouts)
    if whole is not None:
        given["full_param_layout"] = whole


def _megatrons(given: Mapping[str, Any], model: _Chunk) -> Any:
    """The layout that DistributedDataParallel would make itself, from core 0.18 on."""
    ddp_config = given["ddp_config"]
    collection = given.get("pg_collection")
    size = None
    if _may_be_cut(given) and group_of("pp", collection).rank() == 0:
        dp_size = group_of("dp", collection).size()
        size = ddp_config.bucket_size or stock_bucket_size(dp_size)
    dense, experts = model.holders
    return DistributedOptimizer.compute_full_param_layout(
        model.params,
        size,
        dense.dp_size,
        ddp_config,
        expert_data_parallel_world_size=experts.dp_size,
    )


def _in_order(layout: Any, model: _Chunk) -> Any:
    """A layout of one grad buffer, with each bucket's parameters in another order."""
    in_bucket: list[list[Any]] = [[] for _ in layout.bucket_indices]
    for param, (_, _, number) in layout.param_index_map.items():
        in_bucket[number].append(param)
    buckets = []
    for params, (start, stop) in zip(in_bucket, layout.bucket_indices, strict=True):
        sizes = tuple(param.data.nelement() for param in params)
        buckets.append(Bucket(stop - start, sizes, tuple(map(model.muons.get, params))))
    holders = model.holders[any(map(is_experts, layout.param_index_map))]
    chosen = orders(buckets, holders, model.numerics)
    places = dict(layout.param_index_map)
    unpadded = list(layout.per_bucket_numel_unpadded)
    for number, (bucket, order) in enumerate(zip(buckets, chosen, strict=True)):
        if order != bucket.stock_order():
            first, _ = layout.bucket_indices[number]
            begun = starts(order, bucket.sizes)
            for index, start in zip(order, begun, strict=True):
                stop = start + bucket.sizes[index]
                places[in_bucket[number][index]] = (first + start, first + stop, number)
            unpadded[number] = stop
    # as Megatron has them
    in_place = sorted(places.items(), key=lambda item: item[1][0])
    # param_indices, which only fp8 needs, are as Megatron numbers its parameters
    return dataclasses.replace(
        layout, param_index_map=dict(in_place), per_bucket_numel_unpadded=unpadded
    )
