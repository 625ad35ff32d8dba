"""The cost of each algorithm on the ranks of one pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from megatron_muon.lab.plan.on_host import on_host
from megatron_muon.lab.plan.request import Request
from megatron_muon.lab.pricing import memory
from megatron_muon.lab.pricing.paper import price_paper
from megatron_muon.lab.pricing.step import (
    StepTime,
    around,
    host_python,
    price_adamw,
    price_step,
)
from megatron_muon.lab.pricing.upstream import TpMode, price_layer_wise
from megatron_muon.lab.pricing.work import Optimizer, total, traffic_of
from megatron_muon.orthogonalize.numerics import Numerics

Name = Literal["adamw", "contiguous", "bucketed", "paper"] | TpMode
OURS: tuple[Name, ...] = ("contiguous", "bucketed")
NAMES: tuple[Name, ...] = ("adamw", *OURS, "paper", *get_args(TpMode))
TITLES: Mapping[Name, str] = {
    "adamw": "AdamW",
    "contiguous": "Muon, contiguous",
    "bucketed": "Muon, bucketed",
    "paper": "the paper's",
    "blockwise": "Megatron's blockwise: other mathematics",
    "duplicated": "Megatron's duplicated",
    "distributed": "Megatron's distributed",
    "layer_sharded": "Megatron's layer_sharded (#6683)",
}
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of ranks: the mean, and the largest."""

    mean: float = 0.0
    most: float = 0.0

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(sum(values) / len(values), max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """An algorithm's step in one pipeline stage."""

    name: Name
    # time until the last rank has ended its step; with ``full_period`` the mean of full
    # and block steps, while all else but the peak is a full step's
    seconds: float
    launches: int  # kernels and messages of the rank whose host launches most
    rest: dict[str, int]  # bytes at rest by kind, of the rank that has most
    # most bytes above the rest on a rank; None where it is not modelled
    peak: int | None
    host: int = 0  # bytes of state on the host, of the rank that has most
    # parameters that a shard's edge cuts; None: nothing is exchanged
    boundary: int | None = None
    # bytes that a rank sends to ranks of its node, and to others
    inside: Spread = Spread()
    between: Spread = Spread()
    peers: Spread = Spread()  # ranks that it exchanges messages with
    messages: Spread = Spread()  # with Megatron's own Muon, collectives over TP
    flops: Spread = Spread()  # Newton-Schulz flops
    # seconds of the rank with most
    phases: dict[str, float] = field(default_factory=dict)
    exposed: Spread = Spread()  # time that the compute stream waits for messages
    hidden: float = 0.0  # time of messages in which it does not wait
    rounds: tuple[int, ...] = ()  # of each optimizer
    # seconds in which Muon's state travels to or from the host, and those of AdamW's
    # step there, of the rank with most; None: no state is on the host
    link: float | None = None
    on_host: float | None = None
    # seconds of a full and of a block step; None without ``full_period``
    full: float | None = None
    block: float | None = None
    # seconds of the whole of Megatron's step beside this one, by name, and those until
    # the host has launched all of it; without the all-gather of parameters
    around: dict[str, float] = field(default_factory=dict)
    launching: float | None = None

    @property
    def whole(self) -> float | None:
        """Seconds of the whole step, which the host may take longer to launch."""
        if self.launching is None:
            return None
        return max(self.seconds + sum(self.around.values()), self.launching)

    @property
    def uneven(self) -> float:
        """Newton-Schulz flops of the busiest rank over the mean."""
        return self.flops.most / self.flops.mean if self.flops.mean else 1.0


def adamw_row(optimizers: Sequence[Optimizer], request: Request) -> PlannedStep:
    """AdamW's, where all parameters of the stage are its own."""
    seconds = price_adamw(optimizers, request.hardware)
    there = on_host(optimizers, request.hardware, with_muon=False)
    slowest = max(there, key=lambda rank: rank.adamw)
    hosted = memory.at_rest(optimizers, with_muon=False, host=True)
    return PlannedStep(
        name="adamw",
        seconds=slowest.step(seconds),
        on_host=slowest.adamw or None,
        launches=len(optimizers),
        rest=_most(memory.at_rest(optimizers, with_muon=False)),
        host=sum(_most(hosted).values()),
        peak=0,
        phases={"adamw": seconds},
        around=around(optimizers, request.hardware),
    )


def our_row(
    name: Name,
    optimizers: Sequence[Optimizer],
    nodes: Sequence[int],
    request: Request,
) -> PlannedStep:
    """Our Muon's in the layout of the stage's plans."""
    config, hardware, device = request.run.config, request.hardware, request.device

    def priced(plans: Sequence[Optimizer]) -> tuple[StepTime, int]:
        """The times of a step, and its peak memory."""
        step = price_step(plans, config, hardware, device=device, nodes=nodes)
        of_plans = [one.plan for one in plans]
        return step, max(memory.peaks(of_plans, config, device, plans[0].held))

    step, peak = priced(optimizers)
    plans = [one.plan for one in optimizers]
    sent = traffic_of(plans, nodes)
    there = on_host(optimizers, hardware)
    ends = [rank.step(end) for rank, end in zip(there, step.by_rank, strict=True)]
    row = PlannedStep(
        name=name,
        seconds=max(ends),
        link=max(rank.link for rank in there) or None,
        on_host=max(rank.adamw for rank in there) or None,
        launches=step.launches,
        rest=_most(memory.at_rest(optimizers)),
        host=sum(_most(memory.at_rest(optimizers, host=True)).values()),
        peak=peak,
        boundary=sum(len(plan.boundary_parameters()) for plan in plans),
        inside=Spread.of(sent.inside),
        between=Spread.of(sent.between),
        peers=Spread.of(sent.peers),
        messages=Spread.of(sent.messages),
        flops=Spread.of(total([plan.ns_flops() for plan in plans])),
        phases=step.phases,
        exposed=Spread(step.exposed_mean, step.exposed_most),
        hidden=step.hidden_mean,
        rounds=step.rounds,
        around=around(optimizers, hardware),
        launching=step.host + host_python(optimizers, hardware),
    )
    blocks = [replace(one, plan=one.block) for one in optimizers if one.block]
    if not blocks:
        return row
    block, block_peak = priced(blocks)
    longer = row.seconds - block.seconds
    return replace(
        row,
        seconds=row.seconds - longer * (1 - 1 / config.full_period),
        full=row.seconds,
        block=block.seconds,
        peak=max(peak, block_peak),
    )


def paper_row(
    optimizers: Sequence[Optimizer], nodes: Sequence[int], request: Request
) -> PlannedStep:
    """The paper's algorithm over the shards of our plans (``pricing.paper``)."""
    hardware = request.hardware
    numerics = Numerics(request.run.config, request.device)
    ranks = price_paper(optimizers, numerics, hardware, nodes)
    exposed = [rank.exposed(hardware) for rank in ranks]
    there = on_host(optimizers, hardware)  # our states
    ends = [
        state.step(rank.cost.seconds + waits)
        for state, rank, waits in zip(there, ranks, exposed, strict=True)
    ]
    return PlannedStep(
        name="paper",
        seconds=max(ends),
        launches=max(rank.cost.launches for rank in ranks),
        rest=_most(memory.at_rest(optimizers)),
        peak=None,
        inside=Spread.of([rank.inside[0] for rank in ranks]),
        between=Spread.of([rank.between[0] for rank in ranks]),
        flops=Spread.of([rank.flops for rank in ranks]),
        exposed=Spread.of(exposed),
    )


def layer_wise_row(
    mode: TpMode, optimizers: Sequence[Optimizer], request: Request
) -> PlannedStep:
    """Megatron's own, by its rules (``pricing.upstream``)."""
    config, hardware, device = request.run.config, request.hardware, request.device
    most, mean = price_layer_wise(optimizers, config, hardware, mode, device)
    peers = (optimizers[0].plan.grid.tp_size - 1) * bool(most.messages)
    evenly = sum(sum(one.rest) // len(one.rest) for one in optimizers)  # AdamW's part
    has_main = any(one.has_main for one in optimizers)
    return PlannedStep(
        name=mode,
        seconds=most.seconds,
        launches=most.launches,
        rest={
            memory.PARAMETERS: sum(one.parameters for one in optimizers),
            memory.GRADIENTS: sum(one.gradients for one in optimizers),
            memory.MAIN: (most.elements + evenly) * _FP32 * has_main,
            memory.MOMENTUM: most.elements * _FP32,
            memory.MOMENTS: evenly * 2 * _FP32,
        },
        peak=None,
        inside=Spread(mean.sent, most.sent),
        peers=Spread(peers, peers),
        messages=Spread(most.messages, most.messages),
        flops=Spread(mean.flops, most.flops),
        exposed=Spread(most.exposed, most.exposed),
    )


def _most(kinds: Sequence[dict[str, int]]) -> dict[str, int]:
    return max(kinds, key=lambda kind: sum(kind.values()))
