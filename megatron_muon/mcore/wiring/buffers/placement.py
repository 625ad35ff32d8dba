"""Muon's parameters of one DistributedOptimizer: their places in its buffers and their
matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_muon.mcore.routing.matrices import numbered
from megatron_muon.mcore.routing.param_routing import expert_name
from megatron_muon.mcore.routing.routes import Route
from megatron_muon.planning.layout import Parameter, Span

Located = list[tuple[torch.nn.Parameter, Parameter]]


def muon_parameters(routes: Iterable[Route], buffers: Sequence[Any]) -> Located:
    """Every Muon parameter in the buffers, as on EP rank 0: the same list on all ranks
    of a stage.

    ``buffers`` are the grad buffers of one DistributedOptimizer.
    """
    places = {}
    for index, buffer in enumerate(buffers):
        for param, (start, stop, bucket_id) in buffer.param_index_map.items():
            held = buffer.buckets[bucket_id]
            bucket = Span(held.offset, held.offset + held.grad_data.numel())
            places[param] = (index, Span(start, stop), bucket)
    located = []
    for route in routes:
        if route.muon is not None and route.weight.param in places:
            index, span, bucket = places[route.weight.param]
            placed = replace(route.muon, bucket=bucket, span=span, buffer=index)
            located.append((route.weight.param, placed))
    return located


def on_every_ep_rank(
    parameters: Sequence[Parameter], ep_size: int, local_experts: int
) -> list[Parameter]:
    """A stage's parameters, one EP rank after another; experts are numbered over all.

    ``parameters`` are EP rank 0's. What is not an expert's has an ``ep_size`` of 1.
    """
    if ep_size == 1:
        return list(parameters)
    every = []
    for ep_rank in range(ep_size):
        for parameter in parameters:
            name = expert_name(parameter.name, ep_rank, local_experts)
            matrices = tuple(
                numbered(matrix, ep_rank, local_experts)
                for matrix in parameter.matrices
            )
            every.append(
                replace(parameter, name=name, matrices=matrices, ep_rank=ep_rank)
            )
    return every
