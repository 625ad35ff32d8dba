"""How many buckets Megatron's grad buffers have.

The number is chosen where DistributedDataParallel is built, from the parameters of its
model, be it a GPT, a hybrid or a fork's: there their names are known, and no buffer is
made yet. The training loop must leave it to the plugin (``Host.leaves_buckets``). It
concerns the first model chunk of the first pipeline stage alone: Megatron cuts no other
into buckets. The ranks of that stage choose without communication. If two choose
differently, the comparison of their parameters names the first that lies elsewhere,
before the first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_muon.mcore.host.loop import host
from megatron_muon.mcore.host.process_groups import group_of, group_sizes
from megatron_muon.mcore.routing.routes import muons_of, routes_of
from megatron_muon.planning.buckets import Buckets, Buffer, Weight, choose_buckets
from megatron_muon.runtime.patches import Function
from megatron_muon.settings.config import MuonConfig


def build(
    config: MuonConfig,
    original: Function,
    ddp: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Call DistributedDataParallel's own ``__init__`` with the number of buckets that
    is chosen.
    """
    call = inspect.signature(original).bind(ddp, *args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    # Megatron cuts a chunk into buckets then, if its stage is the first
    if given["ddp_config"].overlap_grad_reduce and not given["disable_bucketing"]:
        chosen = Buckets()
        if group_of("pp", given.get("pg_collection")).rank() == 0:
            chosen = _choose(given, config)
        host().take_buckets(chosen)
    original(*call.args, **call.kwargs)


def _choose(given: dict[str, Any], config: MuonConfig) -> Buckets:
    """Choose a number, and put it into the arguments of DistributedDataParallel's
    ``__init__``.
    """
    module, collection = given["module"], given.get("pg_collection")
    sizes = group_sizes(module, collection)
    try:
        routes = routes_of([module], sizes, config)
    except (ValueError, NotImplementedError):
        return Buckets()  # the optimizer says so, on all ranks together
    params = [param for param in module.parameters() if param.requires_grad]
    chosen = choose_buckets(_buffers(params, muons_of(routes)))
    if chosen.number is None:
        return chosen
    ddp_config = given["ddp_config"]
    ddp_config.bucket_size = sum(param.numel() for param in params) // chosen.number
    # from core 0.18 on Megatron-LM has laid the buffers out by the size before
    if given.get("full_param_layout") is not None:
        dp_size = group_of("dp_cp", collection).size()
        expert_dp_size = dp_size * sizes.tp // (sizes.expert_tp * sizes.ep)
        given["full_param_layout"] = DistributedOptimizer.compute_full_param_layout(
            params,
            ddp_config.bucket_size,
            dp_size,
            ddp_config,
            expert_data_parallel_world_size=expert_dp_size,
        )
    return chosen


def _buffers(
    params: Sequence[torch.nn.Parameter], muons: Collection[torch.nn.Parameter]
) -> list[Buffer]:
    """The grad buffers that Megatron will make, those of experts last.

    An embedding that is tied across stages counts as part of the bucket before it.
    Megatron gives it a bucket of its own, whose gradients are ready as late.
    """
    buffers: dict[tuple[bool, Any, Any], list[Weight]] = {}
    for param in params:
        is_experts = not getattr(param, "allreduce", True)
        # parameters in fp8 are of a class of their own
        key = is_experts, param.dtype, type(param)
        buffers.setdefault(key, []).append(Weight(param.numel(), param in muons))
    return [buffers[key] for key in sorted(buffers, key=lambda key: key[0])]
