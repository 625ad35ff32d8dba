"""Megatron's own Muon over whole parameters, priced by its rules on the same hardware.

The rules are those of Megatron-LM's ``layer_wise_optimizer.py`` and of
Emerging-Optimizers:

- A parameter has one owner among the data-parallel ranks, which steps it on all of its
TP ranks.
- Here owners are balanced by priced time, longest first, which is in upstream's favour.
  Its own owners follow from parameters' places in its buffers, since core 0.20 also
  from their cost.
- ``blockwise``, its default up to core 0.19: each TP rank orthogonalizes its slice by
  itself. This is other mathematics: directions depend on TP.
- ``duplicated``: the owner's TP ranks gather the matrix in fp32 and each orthogonalizes
all of it.
- ``distributed``: each TP rank orthogonalizes its slice. In each Newton-Schulz step
  they all-reduce the square of the dim that TP does not cut. The slice of a replicated
  weight is all of it.
- ``layer_sharded`` (https://github.com/NVIDIA/Megatron-LM/pull/6683, not merged): each
  matrix has one of the owner's TP ranks, to which an all-to-all in fp32 brings it, and
  another takes it back.
- One matrix at a time, the standard iteration. Where our products are a library's, two
  of three are those of its ``--muon-use-syrk`` (core 0.20), at the same speed.
- Momentum and update move 66 bytes an element. AdamW's part is spread evenly, at no
other cost.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_muon.lab.pricing.hardware import MICRO, Hardware
from megatron_muon.lab.pricing.kernels import Cost, newton_schulz, sliced_steps, stream
from megatron_muon.lab.pricing.step import adamw
from megatron_muon.lab.pricing.work import Optimizer
from megatron_muon.orthogonalize.iteration import ns_flops, symmetric_flops
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.layout import Matrix, Parameter
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.settings.config import MuonConfig

TpMode = Literal["blockwise", "duplicated", "distributed", "layer_sharded"]
# Per element in fp32: momentum and Nesterov's are read, read, written; the decay; the
# direction from bf16, times two scales; the difference.
_BYTES = 12 + 12 + 8 + 6 + 16 + 12
_LAUNCHES = 7  # of these
_FP32, _BF16 = 4, 2


@dataclass(frozen=True, slots=True)
class LayerWise:
    """Work of an owner, or of the one that has most of each figure; ``mean`` is over
    all owners.
    """

    seconds: float = 0.0  # of all of it, on the rank that ends last
    exposed: float = 0.0  # seconds of collectives over TP; nothing hides them
    launches: int = 0  # of the host
    flops: float = 0  # of Newton-Schulz
    sent: float = 0  # bytes that a rank sends to its TP peers
    messages: int = 0  # collectives over TP
    elements: int = 0  # of parameters with a momentum, on one TP rank

    def __add__(self, other: LayerWise) -> LayerWise:
        return LayerWise(
            self.seconds + other.seconds,
            self.exposed + other.exposed,
            self.launches + other.launches,
            self.flops + other.flops,
            self.sent + other.sent,
            self.messages + other.messages,
            self.elements + other.elements,
        )


def price_layer_wise(
    optimizers: Sequence[Optimizer],
    config: MuonConfig,
    hardware: Hardware,
    mode: TpMode,
    device: Device = "cuda",
) -> tuple[LayerWise, LayerWise]:
    """Upstream's step: of the rank that ends last, with the most of each figure; and
    the mean.

    Args:
        optimizers: the stage's optimizers. Their matrices and TP splits are read, not
            their homes.
        config: steps, coefficients and dtype are read.
        hardware: the hardware of every rank.
        mode: the work of TP ranks that share a matrix.
        device: kind of the hardware; ``cuda_symmetric`` is upstream's own symmetric
            kernel.
    """
    settings = replace(
        config,
        ns_iteration="standard",
        ns_dtype=config.ns_dtype or "bf16",
        elementwise="foreach",  # its norms are torch's, too
    )
    numerics = Numerics(settings, device)
    busiest = LayerWise()
    mean = LayerWise()
    for optimizer in optimizers:
        owners = _owners(optimizer.plan, numerics, hardware, mode)
        last = max(owners, key=lambda owner: owner.seconds, default=LayerWise())
        dp_size = optimizer.plan.grid.dp_size
        elements = sum(
            p.shape[0] * p.shape[1] for p in optimizer.plan.parameters if p.ep_rank == 0
        )
        beside = stream(hardware, _BYTES * elements / dp_size)
        beside += adamw(hardware, sum(optimizer.rest) // len(optimizer.rest))
        launches = last.launches + beside.launches
        busiest += LayerWise(
            max(last.seconds + beside.seconds, launches * hardware.launch_us * MICRO),
            last.exposed,
            launches,
            max((owner.flops for owner in owners), default=0),
            max((owner.sent for owner in owners), default=0),
            last.messages,
            max((owner.elements for owner in owners), default=0),
        )
        flops, sent = (
            sum(getattr(owner, of) for owner in owners) / max(1, len(owners))
            for of in ("flops", "sent")
        )
        mean += LayerWise(flops=flops, sent=sent)
    return busiest, mean


def _owners(
    plan: ExchangePlan, numerics: Numerics, hardware: Hardware, mode: TpMode
) -> list[LayerWise]:
    """Every owner: within an EP rank, the parameter that takes longest goes to the
    least busy.
    """
    homes = plan.grid.tp_size if mode == "layer_sharded" else 1  # of an owner
    works = [  # each of an owner's TP ranks has slices of all its homes' matrices
        LayerWise(launches=_LAUNCHES * homes, elements=homes * shape[0] * shape[1])
        for shape in (parameter.shape for parameter in plan.parameters)
    ]
    for matrix in plan.matrices:
        parameter = plan.parameters[matrix.parameter]
        works[matrix.parameter] += _matrix(parameter, matrix, numerics, hardware, mode)
    by_ep_rank: dict[int, list[LayerWise]] = defaultdict(list)
    for parameter, work in zip(plan.parameters, works, strict=True):
        by_ep_rank[parameter.ep_rank].append(work)
    both_ways = _collective(hardware, 0.0).times(2 * (homes > 1))
    exchanges = LayerWise(
        both_ways.seconds, both_ways.seconds, messages=both_ways.launches
    )
    owners = []
    for of_ep in by_ep_rank.values():
        own = [exchanges] * plan.grid.dp_size * homes
        by_time = [(0.0, owner) for owner in range(len(own))]  # a heap
        for work in sorted(of_ep, key=lambda work: -work.seconds):
            _, least = heapq.heappop(by_time)
            own[least] += work
            heapq.heappush(by_time, (own[least].seconds, least))
        owners += own
    return owners


def _matrix(
    parameter: Parameter,
    matrix: Matrix,
    numerics: Numerics,
    hardware: Hardware,
    mode: TpMode,
) -> LayerWise:
    """The part of each TP rank in a matrix."""
    tp_size, dim = len(parameter.blocks), parameter.partition_dim
    rows, cols = matrix.rows, matrix.cols
    sent = 0
    travel = Cost()
    if tp_size > 1 and dim is not None:
        if mode == "distributed":
            square, cut = (cols, rows) if dim == 0 else (rows, cols)
            return _sliced(square, max(1, cut // tp_size), tp_size, numerics, hardware)
        if mode == "blockwise":
            rows //= tp_size if dim == 0 else 1
            cols //= tp_size if dim == 1 else 1
        else:
            sent = matrix.numel * _FP32 * (tp_size - 1) // tp_size
            travel = _collective(hardware, sent)
        if mode == "layer_sharded":  # there and back; their calls are the owner's
            sent *= 2
            travel = Cost(sent / hardware.node_link)
    shape = max(1, rows), max(1, cols)
    cost = newton_schulz(hardware, *shape, 1, numerics)
    return _in_all(cost, travel, ns_flops(*shape, numerics), sent)


def _sliced(
    square: int, long: int, tp_size: int, numerics: Numerics, hardware: Hardware
) -> LayerWise:
    """The part of each TP rank in a matrix of which each has a slice ``(square,
    long)``.
    """
    steps = len(numerics.steps)
    sent = 2 * (tp_size - 1) * square * square * _BF16 // tp_size
    squares = [
        symmetric_flops(square, inner, numerics.device) for inner in (long, square)
    ]
    return _in_all(
        sliced_steps(hardware, square, long, numerics),
        _collective(hardware, sent).times(steps),
        steps * (sum(squares) + 2 * square * square * long),
        steps * sent,
    )


def _in_all(cost: Cost, travel: Cost, flops: int, sent: int) -> LayerWise:
    """Work on a matrix, and the collectives for it."""
    launches = cost.launches + travel.launches
    seconds = cost.seconds + travel.seconds
    return LayerWise(seconds, travel.seconds, launches, flops, sent, travel.launches)


def _collective(hardware: Hardware, nbytes: float) -> Cost:
    """The cost of a collective over TP ranks, which share a node."""
    return Cost(nbytes / hardware.node_link + hardware.message_us * MICRO, 1)
