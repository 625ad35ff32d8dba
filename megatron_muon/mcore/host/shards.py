"""The flat shards of a DistributedOptimizer that this rank holds: their state and
device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_muon.mcore.host.states import OfFusedAdam, OfWeights, adam_holds_main
from megatron_muon.runtime.states import States


def owned_shards(dist_opt: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """``(parameter, the optimizer's flat shard)`` for each of which this rank holds a
    slice.

    The shard is an fp32 copy for a bf16 parameter, or a view of it where FusedAdam has
    the main parameters (``states``), and a view of an fp32 one. Both are paired in the
    order of Megatron's groups: ``model_param_group_index_map`` misnumbers groups that
    mix both dtypes.
    """
    copies = dist_opt.shard_fp32_from_float16_groups
    views = dist_opt.shard_float16_groups
    for models, shards in (
        (
            dist_opt.model_float16_groups,
            views if adam_holds_main(dist_opt.config) else copies,
        ),
        (dist_opt.model_fp32_groups, dist_opt.shard_fp32_groups),
    ):
        for model_group, shard_group in zip(models, shards, strict=True):
            yield from zip(model_group, shard_group, strict=True)


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


def device_of(model_chunks: Iterable[torch.nn.Module]) -> torch.device:
    """The device of the rank's tensors; for a stage without parameters, the current
    GPU.
    """
    for chunk in model_chunks:
        for param in chunk.parameters():
            return torch.device(param.device)
    return torch.device(torch.cuda.current_device())
