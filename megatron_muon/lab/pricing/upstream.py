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

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from megatron_muon.lab.pricing.hardware import GIGA, MICRO, Hardware
from megatron_muon.lab.pricing.kernels import Cost, newton_schulz, product, stream
from megatron_muon.lab.pricing.step import Optimizer, adamw
from megatron_muon.orthogonalize.iteration import ns_flops
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.layout import Parameter
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.slices import Matrix
from megatron_muon.settings.config import MuonConfig

TpMode = Literal["duplicated", "distributed"]
_BYTES = 46 + 34  # per element, in momentum and update
_FP32, _BF16 = 4, 2


@dataclass(frozen=True, slots=True)
class LayerWise:
    """Upstream's step.

    Attributes:
        seconds: on the rank that ends last.
        exposed: seconds of collectives over TP on that rank; nothing hides them.
        launches: on that rank.
        flops_mean, flops_busiest: Newton-Schulz flops of ranks.
        tp_bytes_mean, tp_bytes_most: bytes that a rank sends to its TP peers.
        messages: collectives over TP of the rank that has most.
        muon_most: most elements with a momentum on one rank.
    """

    seconds: float
    exposed: float
    launches: int
    flops_mean: float
    flops_busiest: int
    tp_bytes_mean: float
    tp_bytes_most: int
    messages: int
    muon_most: int


@dataclass(frozen=True, slots=True)
class _Load:
    """The work of an owner and of each of its TP ranks.

    Attributes:
        cost: of everything; ``tp_seconds`` of it are collectives.
        elements: of its parameters on one TP rank.
    """

    cost: Cost = field(default_factory=Cost)
    tp_seconds: float = 0.0
    flops: int = 0
    sent: int = 0
    messages: int = 0
    elements: int = 0

    def __add__(self, other: _Load) -> _Load:
        return _Load(
            self.cost + other.cost,
            self.tp_seconds + other.tp_seconds,
            self.flops + other.flops,
            self.sent + other.sent,
            self.messages + other.messages,
            self.elements + other.elements,
        )


def price_layer_wise(
    optimizers: Sequence[Optimizer], config: MuonConfig, hardware: Hardware, mode: TpMode
) -> LayerWise:
    """Upstream's step, on the rank that ends last.

    Args:
        optimizers: the stage's optimizers. Their matrices and TP splits are read, not their homes.
        config: steps, coefficients and dtype are read.
        hardware: the hardware of every rank.
        mode: the work of TP ranks that share a matrix.
    """
    settings = replace(
        config,
        ns_iteration="standard",
        ns_dtype=config.ns_dtype or "bf16",
        elementwise="foreach",  # its norms are torch's, too
    )
    numerics = Numerics(settings)
    seconds = exposed = mean_flops = mean_sent = 0.0
    busiest = _Load()
    for optimizer in optimizers:
        loads = _loads(optimizer.plan, numerics, hardware, mode)
        load = max(loads, key=lambda load: load.cost.seconds, default=_Load())
        dp_size = optimizer.plan.grid.dp_size
        elements = sum(p.shape[0] * p.shape[1] for p in optimizer.plan.parameters if p.ep_rank == 0)
        cost = load.cost + stream(hardware, _BYTES * elements / dp_size)
        cost += adamw(hardware, sum(optimizer.rest) // len(optimizer.rest))
        seconds += max(cost.seconds, cost.launches * hardware.launch_us * MICRO)
        exposed += load.tp_seconds
        mean_flops += sum(one.flops for one in loads) / max(1, len(loads))
        mean_sent += sum(one.sent for one in loads) / max(1, len(loads))
        busiest += replace(
            load,
            cost=cost,
            flops=max((one.flops for one in loads), default=0),
            sent=max((one.sent for one in loads), default=0),
            elements=max((one.elements for one in loads), default=0),
        )
    return LayerWise(
        seconds=seconds,
        exposed=exposed,
        launches=busiest.cost.launches,
        flops_mean=mean_flops,
        flops_busiest=busiest.flops,
        tp_bytes_mean=mean_sent,
        tp_bytes_most=busiest.sent,
        messages=busiest.messages,
        muon_most=busiest.elements,
    )


def _loads(plan: ExchangePlan, numerics: Numerics, hardware: Hardware, mode: TpMode) -> list[_Load]:
    """The load of every owner."""
    loads: dict[int, list[_Load]] = defaultdict(list)  # by EP rank
    for parameter, matrices in _matrices(plan):
        rows, cols = parameter.shape
        # momentum and update of a parameter
        load = _Load(Cost(0.0, 9), elements=rows * cols)
        for matrix in matrices:
            load += _matrix(parameter, matrix, numerics, hardware, mode)
        loads[parameter.ep_rank].append(load)
    dp_size = plan.grid.dp_size
    return [load for of_ep in loads.values() for load in _balanced(of_ep, dp_size)]


def _balanced(parameters: Sequence[_Load], ranks: int) -> list[_Load]:
    loads = [_Load()] * ranks
    by_time = [(0.0, rank) for rank in range(ranks)]  # a heap
    for one in sorted(parameters, key=lambda one: -one.cost.seconds):
        _, least = heapq.heappop(by_time)
        loads[least] += one
        heapq.heappush(by_time, (loads[least].cost.seconds, least))
    return loads


def _matrix(
    parameter: Parameter, matrix: Matrix, numerics: Numerics, hardware: Hardware, mode: TpMode
) -> _Load:
    """The part of each TP rank in a matrix."""
    tp_size, dim = len(parameter.blocks), parameter.partition_dim
    flops = ns_flops(matrix.rows, matrix.cols, numerics)
    whole = newton_schulz(hardware, matrix.rows, matrix.cols, 1, numerics)
    if tp_size == 1 or dim is None:
        return _Load(whole, flops=flops)
    if mode == "duplicated":
        sent = matrix.numel * _FP32 * (tp_size - 1) // tp_size
        gather = _collective(hardware, sent)
        return _Load(whole + gather, gather.seconds, flops, sent, 1)
    square, cut = (matrix.cols, matrix.rows) if dim == 0 else (matrix.rows, matrix.cols)
    local = max(1, cut // tp_size)
    step = product(hardware, square, square, local) + product(hardware, square, square, square)
    step += product(hardware, square, local, square)
    step += stream(hardware, 2 * _BF16 * (square * square + square * local), 2)
    sent = 2 * (tp_size - 1) * square * square * _BF16 // tp_size
    reduce, steps = _collective(hardware, sent), len(numerics.steps)
    return _Load(
        (step + reduce).times(steps),
        steps * reduce.seconds,
        steps * 2 * (2 * square * square * local + square**3),
        steps * sent,
        steps,
    )


def _collective(hardware: Hardware, nbytes: float) -> Cost:
    """The cost of a collective over TP ranks, which share a node."""
    seconds = nbytes / (hardware.node_gbytes * GIGA * hardware.node_efficiency)
    return Cost(seconds + hardware.message_us * MICRO, 1)


def _matrices(plan: ExchangePlan) -> Iterator[tuple[Parameter, list[Matrix]]]:
    matrices = iter(plan.matrices)
    for parameter in plan.parameters:
        yield parameter, [next(matrices) for _ in parameter.matrices]
