"""What a step reads from Megatron's parameter groups, checked before anything changes."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch

from megatron_muon.console import first_names
from megatron_muon.mcore.routing.param_routing import expert_name
from megatron_muon.mcore.wiring.buffers.shards import owned_shards

_READ = ("lr", "weight_decay")
_UNCHANGED = "no optimizer state or parameter has been changed"


def require_usable_groups(dist_opt: Any) -> None:
    """Refuse groups that the next step cannot use. It does not communicate.

    A rate may be a tensor with one element; one on a GPU is waited for, as in the step.

    Args:
        dist_opt: a MuonDistributedOptimizer that is no stub.

    Raises:
        ValueError: a rate or decay is no finite number, or no group has a parameter of Muon's.
    """
    groups = dist_opt.optimizer.param_groups
    for number, group in enumerate(groups):
        for key in _READ:
            if group["params"] and not _is_finite(group.get(key)):
                names = [_names(dist_opt)[id(shard)] for shard in group["params"]]
                raise ValueError(
                    f"parameter group {number} ({first_names(names)}) has {key} "
                    f"{group.get(key)!r}, which is no finite number: set one before the step, "
                    f"as Megatron's scheduler does; {_UNCHANGED}"
                )
    there = {id(shard) for group in groups for shard in group["params"]}
    muons = dist_opt.muon.main_params.values()
    dropped = [id(shard) for shard in muons if id(shard) not in there]
    if dropped:
        names = [_names(dist_opt)[each] for each in dropped]
        raise ValueError(
            f"no parameter group has {first_names(names, 5)} any more, which Muon updates: put "
            "them back, or freeze them by requires_grad_(False) before the model's buffers are "
            f"made; {_UNCHANGED}"
        )


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, Real)
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1
    return is_number and math.isfinite(value)


def _names(dist_opt: Any) -> dict[int, str]:
    """Names of parameters by the ids of their shards."""
    names = {route.weight.param: route.weight.name for route in dist_opt.routes}
    return {
        id(shard): expert_name(names[param], dist_opt.ep_rank, dist_opt.local_experts)
        for param, shard in owned_shards(dist_opt)
    }
