"""The cost of each algorithm on the ranks of one pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_muon.lab.pricing import memory, paper
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.memory import MAIN, MOMENTS, MOMENTUM, Buffers, at_rest
from megatron_muon.lab.pricing.step import Optimizer, StepTime, price_adamw, price_step
from megatron_muon.lab.pricing.traffic import Traffic, exchanges_of, traffic_of
from megatron_muon.lab.pricing.upstream import LayerWise, TpMode, price_layer_wise
from megatron_muon.lab.pricing.work import held_elements, total
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.settings.config import MuonConfig

Name = Literal["adamw", "contiguous", "bucketed", "paper", "duplicated", "distributed"]
OURS: tuple[Name, ...] = ("contiguous", "bucketed")
NAMES: tuple[Name, ...] = ("adamw", *OURS, "paper", "duplicated", "distributed")
TITLES: Mapping[Name, str] = {
    "adamw": "AdamW",
    "contiguous": "Muon, contiguous",
    "bucketed": "Muon, bucketed",
    "paper": "the paper's",
    "duplicated": "Megatron's, duplicated",
    "distributed": "Megatron's, distributed",
}
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of ranks: the mean, and the largest."""

    mean: float = 0.0
    most: float = 0.0

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(sum(values) / len(values), max(values)) if values else Spread()


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """An algorithm's step in one pipeline stage.

    Attributes:
        name: the algorithm.
        boundary: parameters that a shard's edge cuts; None where nothing is exchanged for them.
        inside, between: bytes that a rank sends in the step to ranks of its node, and to others.
        peers: ranks that it exchanges messages with.
        messages: messages that it sends; with Megatron's own Muon, collectives over TP.
        flops: Newton-Schulz flops.
        launches: kernels and messages that the host of the rank with most launches.
        rest: bytes at rest by kind, of the rank that has most.
        peak: most bytes above the rest on a rank during the step; None where it is not modelled.
        phases: seconds on the compute stream of the rank that has most of the phase.
        seconds: time until the last rank has ended its step.
        exposed: time that the compute stream waits for messages, and so for later ranks.
        hidden: time of messages in which it does not wait.
        rounds: of each optimizer.
        updated: see ``StepTime``.
    """

    name: Name
    boundary: int | None
    inside: Spread
    between: Spread
    peers: Spread
    messages: Spread
    flops: Spread
    launches: int
    rest: dict[str, int]
    peak: int | None
    phases: dict[str, float]
    seconds: float
    exposed: Spread
    hidden: float
    rounds: tuple[int, ...] = ()
    updated: tuple[tuple[float, ...], ...] = ()

    @property
    def memory(self) -> int:
        """All bytes at rest."""
        return sum(self.rest.values())


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage's optimizers in one layout.

    Attributes:
        optimizers: in the order of their steps.
        buffers: Megatron's buffers of each.
        nodes: the node of each rank.
    """

    optimizers: tuple[Optimizer, ...]
    buffers: tuple[Buffers, ...]
    nodes: tuple[int, ...]

    @property
    def plans(self) -> list[ExchangePlan]:
        return [one.plan for one in self.optimizers]

    @property
    def held(self) -> list[list[int]]:
        return [held_elements(plan) for plan in self.plans]

    @property
    def rest(self) -> list[tuple[int, ...]]:
        return [one.rest for one in self.optimizers]

    def reduced(self) -> float:
        """Bytes that a rank sends for gradients and parameters, whichever the algorithm."""
        return sum(
            (one.gradients + one.parameters) * (plan.grid.dp_size - 1) / plan.grid.dp_size
            for one, plan in zip(self.buffers, self.plans, strict=True)
        )


def adamw_row(stage: PlannedStage, hardware: Hardware) -> PlannedStep:
    """AdamW's, where all parameters of the stage are its own."""
    seconds = price_adamw(stage.optimizers, hardware)
    none = [[0] * plan.size for plan in stage.plans]
    everything = [total(both) for both in zip(stage.held, stage.rest, strict=True)]
    return PlannedStep(
        name="adamw",
        boundary=None,
        inside=Spread(),
        between=Spread(),
        peers=Spread(),
        messages=Spread(),
        flops=Spread(),
        launches=len(stage.optimizers),
        rest=_most(at_rest(stage.buffers, none, everything)),
        peak=0,
        phases={"adamw": seconds},
        seconds=seconds,
        exposed=Spread(),
        hidden=0.0,
    )


def our_row(
    name: Name, stage: PlannedStage, config: MuonConfig, hardware: Hardware, device: Device
) -> PlannedStep:
    """Our Muon's in the layout that the stage's plans are of."""
    plans = stage.plans
    step = price_step(stage.optimizers, config, hardware, device=device, nodes=stage.nodes)
    flops = total([plan.ns_flops() for plan in plans])
    peaks = memory.peaks(plans, config, device)
    sent = traffic_of(exchanges_of(plans), stage.nodes)
    return _row(name, stage, step, sent, flops, peaks, hardware.momentum_bytes)


def paper_row(
    stage: PlannedStage, config: MuonConfig, hardware: Hardware, device: Device
) -> PlannedStep:
    """The paper's over the same shards."""
    buckets = [paper.buckets_of(plan) for plan in stage.plans]
    step = paper.price_paper(
        stage.optimizers, buckets, config, hardware, device=device, nodes=stage.nodes
    )
    every = [work for of_plan in buckets for work in of_plan]
    flops = paper.flops_of(every, config, device)
    peaks = paper.peaks(every, stage.plans[0].itemsize)
    sent = paper.traffic(every, stage.nodes)
    return _row("paper", stage, step, sent, flops, peaks, hardware.momentum_bytes)


def layer_wise_row(
    mode: TpMode, stage: PlannedStage, config: MuonConfig, hardware: Hardware
) -> PlannedStep:
    """Megatron's own, by its rules (``pricing.upstream``)."""
    step = price_layer_wise(stage.optimizers, config, hardware, mode)
    tp_size = stage.plans[0].grid.tp_size
    return PlannedStep(
        name=mode,
        boundary=None,
        inside=Spread(step.tp_bytes_mean, step.tp_bytes_most),
        between=Spread(),
        peers=Spread(tp_size - 1, tp_size - 1) if step.messages else Spread(),
        messages=Spread(step.messages, step.messages),
        flops=Spread(step.flops_mean, step.flops_busiest),
        launches=step.launches,
        rest=_owners_rest(stage, step),
        peak=None,
        phases={},
        seconds=step.seconds,
        exposed=Spread(step.exposed, step.exposed),
        hidden=0.0,
    )


def _owners_rest(stage: PlannedStage, step: LayerWise) -> dict[str, int]:
    """At rest on the owner with most elements; AdamW's part is spread evenly."""
    evenly = sum(sum(rest) // len(rest) for rest in stage.rest)
    buffers = stage.buffers
    return {
        memory.PARAMETERS: sum(one.parameters for one in buffers),
        memory.GRADIENTS: sum(one.gradients for one in buffers),
        MAIN: (step.muon_most + evenly) * _FP32 * any(one.has_main for one in buffers),
        MOMENTUM: step.muon_most * _FP32,
        MOMENTS: evenly * 2 * _FP32,
    }


def _row(
    name: Name,
    stage: PlannedStage,
    step: StepTime,
    sent: Traffic,
    flops: Sequence[int],
    peaks: Sequence[int],
    momentum_bytes: int,
) -> PlannedStep:
    return PlannedStep(
        name=name,
        boundary=sum(len(plan.boundary_parameters()) for plan in stage.plans),
        inside=Spread.of(sent.inside),
        between=Spread.of(sent.between),
        peers=Spread.of(sent.peers),
        messages=Spread.of(sent.messages),
        flops=Spread.of(flops),
        launches=step.launches,
        rest=_most(at_rest(stage.buffers, stage.held, stage.rest, momentum_bytes)),
        peak=max(peaks, default=0),
        phases=step.phases,
        seconds=step.seconds,
        exposed=Spread(step.exposed_mean, step.exposed_most),
        hidden=step.hidden_mean,
        rounds=step.rounds,
        updated=step.updated,
    )


def _most(kinds: Sequence[dict[str, int]]) -> dict[str, int]:
    return max(kinds, key=lambda kind: sum(kind.values()))
