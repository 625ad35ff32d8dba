"""Megatron's own Muon over whole parameters, priced by its rules on the same hardware.

The rules are those of Megatron-LM's ``layer_wise_optimizer.py`` and of Emerging-Optimizers:

- A parameter has one owner among the data-parallel ranks, which steps it on all of its TP ranks.
- Here owners are balanced by priced time, longest first, which is in upstream's favour. Its own
  owners follow from parameters' places in its buffers, in older cores from their sizes.
- ``duplicated``: the owner's TP ranks gather the matrix in fp32 and each orthogonalizes all of it.
- ``distributed``: each TP rank orthogonalizes its slice. In each Newton-Schulz step they all-reduce
  the square of the dim that TP does not cut. The slice of a replicated weight is all of it.
- One matrix at a time, the standard iteration, torch's products.
- Momentum and update move as many bytes as ours without fused kernels. AdamW's part is spread
  evenly, at no other cost.

Not counted: upstream all-reduces whole gradients, where ours reduce-scatters them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from megatron_muon.config import MuonConfig
from megatron_muon.planning.layout import Parameter
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.segments import Matrix
from megatron_muon.pricing.hardware import GIGA, MICRO, Hardware
from megatron_muon.pricing.kernels import Cost, newton_schulz, product, stream
from megatron_muon.pricing.step import Optimizer, adamw

TpMode = Literal["duplicated", "distributed"]
_BYTES = 46 + 34  # per element, in momentum and update
_FP32, _BF16 = 4, 2


def price_layer_wise(
    optimizers: Sequence[Optimizer], config: MuonConfig, hardware: Hardware, mode: TpMode
) -> float:
    """Seconds of upstream's step on the rank that ends last.

    Args:
        optimizers: the stage's optimizers. Their matrices and TP splits are read, not their homes.
        config: steps, coefficients and dtype are read.
        hardware: the hardware of every rank.
        mode: the work of TP ranks that share a matrix.
    """
    settings = replace(config, ns_iteration="standard")
    seconds = 0.0
    for optimizer in optimizers:
        busiest = _busiest(optimizer.plan, settings, hardware, mode)
        dp_size = optimizer.plan.grid.dp_size
        elements = sum(p.shape[0] * p.shape[1] for p in optimizer.plan.parameters if p.ep_rank == 0)
        cost = busiest + stream(hardware, _BYTES * elements / dp_size)
        cost += adamw(hardware, sum(optimizer.rest) // len(optimizer.rest))
        seconds += max(cost.seconds, cost.launches * hardware.launch_us * MICRO)
    return seconds


def _busiest(plan: ExchangePlan, config: MuonConfig, hardware: Hardware, mode: TpMode) -> Cost:
    costs: dict[int, list[Cost]] = defaultdict(list)  # by EP rank
    for parameter, matrices in _matrices(plan):
        cost = Cost(0.0, 9)  # momentum and update of a parameter
        for matrix in matrices:
            cost += _matrix(parameter, matrix, config, hardware, mode)
        costs[parameter.ep_rank].append(cost)
    dp_size = plan.grid.dp_size
    loads = [load for of_ep in costs.values() for load in _balanced(of_ep, dp_size)]
    return max(loads, key=lambda load: load.seconds, default=Cost())


def _balanced(costs: Sequence[Cost], ranks: int) -> list[Cost]:
    loads = [Cost()] * ranks
    for cost in sorted(costs, key=lambda cost: -cost.seconds):
        least = min(range(ranks), key=lambda rank: loads[rank].seconds)
        loads[least] += cost
    return loads


def _matrix(
    parameter: Parameter, matrix: Matrix, config: MuonConfig, hardware: Hardware, mode: TpMode
) -> Cost:
    tp_size, dim = len(parameter.blocks), parameter.partition_dim
    if tp_size == 1 or dim is None:
        return newton_schulz(hardware, matrix.rows, matrix.cols, 1, config)
    if mode == "duplicated":
        whole = newton_schulz(hardware, matrix.rows, matrix.cols, 1, config)
        return whole + _collective(hardware, matrix.numel * _FP32 * (tp_size - 1) / tp_size)
    square, cut = (matrix.cols, matrix.rows) if dim == 0 else (matrix.rows, matrix.cols)
    local = max(1, cut // tp_size)
    step = product(hardware, square, square, local) + product(hardware, square, square, square)
    step += product(hardware, square, local, square)
    step += stream(hardware, 2 * _BF16 * (square * square + square * local), 2)
    reduced = 2 * (tp_size - 1) / tp_size * square * square * _BF16
    return (step + _collective(hardware, reduced)).times(config.ns_steps)


def _collective(hardware: Hardware, nbytes: float) -> Cost:
    """The cost of a collective over TP ranks, which share a node."""
    seconds = nbytes / (hardware.node_gbytes * GIGA * hardware.node_efficiency)
    return Cost(seconds + hardware.message_us * MICRO, 1)


def _matrices(plan: ExchangePlan) -> Iterator[tuple[Parameter, list[Matrix]]]:
    matrices = iter(plan.matrices)
    for parameter in plan.parameters:
        yield parameter, [next(matrices) for _ in parameter.matrices]
