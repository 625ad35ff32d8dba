"""Muon's parameters of one DistributedOptimizer: their places in its buffers and their matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_muon.mcore.routing.matrices import matrices_of
from megatron_muon.mcore.routing.param_routing import Weight, expert_name, weights, why_adamw
from megatron_muon.mcore.wiring.process_groups import Sizes
from megatron_muon.planning.buckets.order import UNPLACED
from megatron_muon.planning.layout import MatrixShape, Parameter, Span
from megatron_muon.settings.config import MuonConfig

Located = list[tuple[torch.nn.Parameter, Parameter]]


def muon_parameters(
    model_chunks: Sequence[Any],
    buffers: Sequence[Any],
    tp_size: int,
    expert_tp_size: int,
    config: MuonConfig,
) -> Located:
    """Every Muon parameter in the buffers, as on EP rank 0: the same list on all ranks of a stage.

    Args:
        model_chunks: this rank's.
        buffers: the grad buffers of one DistributedOptimizer.
        tp_size, expert_tp_size: number of TP ranks that share a weight, and an expert's weight.
        config: the settings.

    Raises:
        ValueError, NotImplementedError: a weight that cannot be routed or is not what its name
            promises.
    """
    places = {
        param: (index, Span(start, stop), _bucket_span(buffer.buckets[bucket_id]))
        for index, buffer in enumerate(buffers)
        for param, (start, stop, bucket_id) in buffer.param_index_map.items()
    }
    located = []
    for weight in weights(model_chunks):
        size = expert_tp_size if weight.is_expert else tp_size
        if weight.param in places and why_adamw(weight, size, config) is None:
            index, span, bucket = places[weight.param]
            parameter = unplaced(weight, size, config)
            placed = replace(parameter, bucket=bucket, span=span, buffer=index)
            located.append((weight.param, placed))
    return located


def muons_of(
    model_chunks: Sequence[Any], sizes: Sizes, config: MuonConfig
) -> set[torch.nn.Parameter]:
    """The parameters of these chunks that are Muon's.

    Raises:
        ValueError, NotImplementedError: a weight cannot be routed.
    """
    return {
        weight.param
        for weight in weights(model_chunks)
        if why_adamw(weight, sizes.tp_of(weight), config) is None
    }


def unplaced(weight: Weight, tp_size: int, config: MuonConfig) -> Parameter:
    """A weight of Muon's before it has a place in a grad buffer.

    Args:
        weight: Muon's.
        tp_size: number of TP ranks that share it.
        config: the settings.

    Raises:
        ValueError, NotImplementedError: it is not what its name promises.
    """
    holding = matrices_of(weight, tp_size, config)
    matrices, blocks = holding.matrices
    return Parameter(
        name=weight.name,
        shape=holding.shape,
        partition_dim=holding.partition_dim,
        bucket=UNPLACED,
        span=UNPLACED,
        buffer=0,
        matrices=matrices,
        blocks=blocks,
    )


def on_every_ep_rank(
    parameters: Sequence[Parameter], ep_size: int, local_experts: int
) -> list[Parameter]:
    """All of a stage's parameters: those of each EP rank in turn, experts numbered over all.

    Args:
        parameters: those of EP rank 0.
        ep_size: number of EP ranks; 1 for what is not an expert's.
        local_experts: experts of a layer on one EP rank.
    """
    if ep_size == 1:
        return list(parameters)
    return [
        replace(
            parameter,
            name=expert_name(parameter.name, ep_rank, local_experts),
            matrices=tuple(
                _numbered(matrix, ep_rank, local_experts) for matrix in parameter.matrices
            ),
            ep_rank=ep_rank,
        )
        for ep_rank in range(ep_size)
        for parameter in parameters
    ]


def local_experts(model_chunks: Sequence[Any], ep_size: int) -> int:
    """Experts of a layer on one EP rank; 0 in a dense model."""
    return (getattr(get_model_config(model_chunks[0]), "num_moe_experts", None) or 0) // ep_size


def _numbered(matrix: MatrixShape, ep_rank: int, local_experts: int) -> MatrixShape:
    name, bracket, number = matrix.name.partition("[expert ")
    if bracket:
        number = str(int(number.rstrip("]")) + ep_rank * local_experts)
        return replace(matrix, name=f"{name}[expert {number}]")
    return replace(matrix, name=expert_name(name, ep_rank, local_experts))


def _bucket_span(bucket: Any) -> Span:
    return Span(bucket.offset, bucket.offset + bucket.grad_data.numel())
