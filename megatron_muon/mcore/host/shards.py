"""The flat shards of a DistributedOptimizer that this rank holds: their state and
device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_muon.mcore.host.states import OfFusedAdam, OfWeights, adam_holds_main
from megatron_muon.runtime.states import States


def parts_of(chain: Any) -> list[Any]:
    """The optimizers of a chain that are no stubs, dense and experts'."""
    return [part for part in chain.chained_optimizers if not part.is_stub_optimizer]


def owned_shards(dist_opt: Any) -> Iterator[tuple[Parameter, Tensor]]:
    """``(parameter, its flat shard in the optimizer)``, where this rank holds a slice.

    The shard of an fp32 parameter is a view of it. The shard of a bf16 parameter is an
    fp32 copy, or a view where FusedAdam holds the main parameters (``states``). Pairs
    are in the order of Megatron's groups: ``model_param_group_index_map`` misnumbers
    groups with both dtypes.
    """
    narrow = dist_opt.shard_fp32_from_float16_groups
    if adam_holds_main(dist_opt.config):
        narrow = dist_opt.shard_float16_groups
    params = chain(dist_opt.model_float16_groups, dist_opt.model_fp32_groups)
    shards = chain(narrow, dist_opt.shard_fp32_groups)
    for param_group, shard_group in zip(params, shards, strict=True):
        yield from zip(param_group, shard_group, strict=True)


def states_of(dist_opt: Any) -> States:
    """How a DistributedOptimizer that is no stub holds main parameters and moments."""
    config = dist_opt.config
    if config.optimizer_cpu_offload:
        # for this option only
        from megatron_muon.mcore.host.offloaded_states import OfHybrid

        return OfHybrid(dist_opt.optimizer)
    if not config.use_precision_aware_optimizer:
        return States(dist_opt.optimizer)
    kind = OfWeights if adam_holds_main(config) else OfFusedAdam
    return kind(dist_opt.optimizer)


def device_of(model_chunks: Iterable[Module]) -> torch.device:
    """The device of the rank's tensors; for a stage without parameters, the current
    GPU.
    """
    for param in chain.from_iterable(chunk.parameters() for chunk in model_chunks):
        return torch.device(param.device)
    return torch.device(torch.cuda.current_device())
