"""The rank that counts a weight's gradient in Megatron's norm: corrects marks that are
wrong.

Megatron counts a gradient on every TP rank if its parameter is marked
``tensor_model_parallel``, else on the first one. Before core 0.17 Transformer Engine
marks weights that are duplicated over TP (MLA's down projections). Their gradients then
count once a rank. From 2.13 on it marks no grouped expert of cores before 0.19;
Megatron marks no learnable softmax offset and, before core 0.16, no norm in a Mamba
mixer. Their gradients then count on the first TP rank alone. The norm, and with it the
clip, would depend on the topology. Main parameters have marks of their own, which only
the norm and the count of zeros read, so correcting those changes nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

from megatron_muon.mcore.host.process_groups import Stage
from megatron_muon.mcore.host.shards import owned_shards
from megatron_muon.mcore.routing.param_routing import (
    Weight,
    is_cut,
    of_any_number,
    partition_dim_of,
)
from megatron_muon.runtime.consensus import together

_MARK = "tensor_model_parallel"


def count_once(parts: Sequence[Any], stage: Stage) -> list[str]:
    """Correct the marks of main parameters. Every rank of the world calls this.

    Returns:
        Names, with * for numbers, of the weights whose mark was wrong on this rank.

    Raises:
        RuntimeError: on ranks that have no error themselves when another has.
    """

    weights = {route.weight.param: route.weight for route in parts[0].routes}

    def corrected() -> list[str]:
        names: list[str] = []
        for part in parts:
            for param, shard in () if part.is_stub_optimizer else owned_shards(part):
                weight = weights[param]
                counts = counts_here(weight, stage)
                if counts is None:
                    continue
                before = _counted(part, shard)
                setattr(shard, _MARK, counts)
                if _counted(part, shard) != before:
                    names.append(of_any_number(weight.name))
        return names

    return together(corrected, None, stage.device)


def counts_here(weight: Weight, stage: Stage) -> bool | None:
    """Whether this rank is the one to count what it holds; None where Megatron's mark
    is kept.
    """
    if not weight.is_expert:
        if stage.tp.size() == 1:
            return None
        if weight.param.dim() != 2:
            # other biases and norms are marked as they are
            return is_cut(weight) or None
        return (
            partition_dim_of(weight, stage.tp.size()) is not None
            or stage.tp.rank() == 0
        )
    if stage.expert_tp is None or stage.expert_tp.size() == 1:
        return True  # EP spreads experts over TP ranks too: nobody else has this one
    if weight.is_module("GroupedMLP"):
        return True
    if weight.leaf not in ("linear_fc1", "linear_fc2"):
        return None
    replicated = weight.param.dim() != 2 and weight.leaf == "linear_fc2"
    return not replicated or stage.expert_tp.rank() == 0


def _counted(part: Any, shard: torch.Tensor) -> bool:
    """Whether Megatron counts it here, by its own function and the groups that it
    passes.
    """
    function = layers.param_is_not_tensor_parallel_duplicate
    names = inspect.signature(function).parameters.keys() & {
        "tp_group",
        "expert_tp_group",
    }
    return bool(function(shard, **{name: getattr(part, name, None) for name in names}))
