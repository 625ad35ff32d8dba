"""Bytes that AdamW and Muon are predicted to hold and send, on GPUs and on CPUs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.lab.dry_run.model import ranks_of
from megatron_muon.lab.dry_run.stages import Planned
from megatron_muon.lab.plan.kinds import adamw_scratch, buffers_of, optimizer_of, planned_kinds
from megatron_muon.lab.pricing.memory import MAIN, MOMENTS, MOMENTUM, at_rest, peaks
from megatron_muon.lab.pricing.work import held_elements, total
from megatron_muon.orthogonalize.numerics import Device, is_cuda
from megatron_muon.settings.config import MuonConfig


@dataclass(frozen=True, slots=True)
class Predicted:
    """Bytes of all pipeline stages.

    Attributes:
        exchange: bytes that all ranks send in Muon's exchange.
        busiest: bytes of the rank that sends most.
        adamw_state, muon_state: bytes of main parameters and optimizer state on the rank that has
            most, with either optimizer.
        adamw_peak, muon_peak: bytes above those at the highest moment of ``optimizer.step()`` on
            the rank that has most. Single numbers are left out: a GPU's AdamW has nothing else.
    """

    exchange: int
    busiest: int
    adamw_state: int
    muon_state: int
    adamw_peak: int
    muon_peak: int


def predicted(flags: Namespace, muon: MuonConfig, adamw: MuonConfig, device: Device) -> Predicted:
    """Plan every stage; no process group is needed.

    Args:
        flags: of the model and its ranks.
        muon: Muon's settings.
        adamw: settings that give the layout of AdamW's buffers.
        device: kind of device of all ranks.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the plugin
            refuses the model.
    """
    ranks = ranks_of(flags)
    kinds = planned_kinds([(flags, muon), (flags, adamw)], ranks, device, range(ranks.pp))
    with_muon = [(len(kind.stages), _muons(kind.planned[0], muon, device)) for kind in kinds]
    with_adamw = [_adamws(kind.planned[1], device) for kind in kinds]
    return Predicted(
        exchange=sum(count * sum(stage.sent) for count, stage in with_muon),
        busiest=max(max(stage.sent) for _, stage in with_muon),
        adamw_state=max(max(stage.state) for stage in with_adamw),
        muon_state=max(max(stage.state) for _, stage in with_muon),
        adamw_peak=max(max(stage.peak) for stage in with_adamw),
        muon_peak=max(max(stage.peak) for _, stage in with_muon),
    )


@dataclass(frozen=True, slots=True)
class _Stage:
    """Bytes by rank: sent in the exchange, of state, and above that at the peak."""

    sent: Sequence[int]
    state: Sequence[int]
    peak: Sequence[int]


def _muons(parts: Sequence[Planned], config: MuonConfig, device: Device) -> _Stage:
    optimizers = [optimizer_of(part) for part in parts]
    plans = [one.plan for one in optimizers]
    held = [held_elements(plan) for plan in plans]
    scratch = [] if is_cuda(device) else [adamw_scratch(part) for part in parts]
    return _Stage(
        sent=total([plan.sent_bytes() for plan in plans]),
        state=_state(parts, held, [one.rest for one in optimizers]),
        peak=peaks(plans, config, device, scratch),
    )


def _adamws(parts: Sequence[Planned], device: Device) -> _Stage:
    optimizers = [optimizer_of(part) for part in parts]
    every = [total([held_elements(one.plan), one.rest]) for one in optimizers]
    none = [[0] * len(one) for one in every]
    scratch = [adamw_scratch(part, everything=True) for part in parts]
    largest = [0 if is_cuda(device) else max(of_rank) for of_rank in zip(*scratch, strict=True)]
    return _Stage(none[0], _state(parts, none, every), largest)


def _state(
    parts: Sequence[Planned], held: Sequence[Sequence[int]], rest: Sequence[Sequence[int]]
) -> list[int]:
    kinds = at_rest([buffers_of(part) for part in parts], held, rest)
    return [of_rank[MAIN] + of_rank[MOMENTS] + of_rank[MOMENTUM] for of_rank in kinds]
