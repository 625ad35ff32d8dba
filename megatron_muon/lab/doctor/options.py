"""The switches of Megatron's configurations that Muon refuses, found by a run's own
check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron_muon.mcore.wiring.validate import refuse_unsupported


def refused_options() -> list[str]:
    """Names of the imported Megatron's fields that a run with Muon cannot turn on."""
    return sorted(
        {field for holder, field in _switches() if _is_refused(holder, field)}
    )


def _switches() -> Iterator[tuple[str, str]]:
    """(configuration, field) of every field that is off by default."""
    for holder, config in _configs().items():
        for field in dataclasses.fields(config):
            # settings of Megatron's own Muon
            upstreams = field.name.startswith("muon_")
            if getattr(config, field.name) is False and not upstreams:
                yield holder, field.name


def _configs() -> dict[str, Any]:
    return {
        "optimizer": OptimizerConfig(
            optimizer="muon", lr=1e-3, bf16=True, use_distributed_optimizer=True
        ),
        "ddp": DistributedDataParallelConfig(use_distributed_optimizer=True),
        "model": TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
    }


def _is_refused(holder: str, field: str) -> bool:
    configs = _configs()
    setattr(configs[holder], field, True)
    if field == "optimizer_cpu_offload":  # which Megatron-LM has with this one only
        configs[holder].use_precision_aware_optimizer = True
    chunk: Any = DistributedDataParallel.__new__(DistributedDataParallel)
    # an empty one: the check only reads its configurations
    torch.nn.Module.__init__(chunk)
    chunk.config, chunk.ddp_config = configs["model"], configs["ddp"]
    try:
        refuse_unsupported(configs["optimizer"], [chunk])
    except (ValueError, NotImplementedError):
        return True
    return False
