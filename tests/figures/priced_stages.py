"""Prices of pipeline stages by each iteration, with and without a library's kernel."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megatron_muon.cpu.on  # noqa: F401 before what imports Megatron
from megatron_muon.lab.dry_run.model import Ranks
from megatron_muon.lab.dry_run.stages import planned_on
from megatron_muon.lab.plan.kinds import optimizer_of
from megatron_muon.lab.plan.options import command_line
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.step import StepTime, price_adamw, price_step
from megatron_muon.lab.pricing.upstream import price_layer_wise
from megatron_muon.lab.routes.model_flags import megatron_is_quiet
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.settings.coefficients import NsDtype
from megatron_muon.settings.config import MuonConfig, NsIteration

Changes = Mapping[str, Any]  # settings of MuonConfig to change, by name
VARIANTS: tuple[Changes, ...] = ({"ns_iteration": "standard"}, {"ns_iteration": "auto"})


@dataclass(frozen=True, slots=True)
class OurStep:
    """The price of a step of our Muon.

    Attributes:
        iteration, dtype: iteration and dtype of Newton-Schulz.
        kernel: whether a library's kernel computes symmetric products.
        step: times of the step.
    """

    iteration: NsIteration
    dtype: NsDtype
    kernel: bool
    step: StepTime


@dataclass(frozen=True, slots=True)
class PricedStage:
    """Prices of a pipeline stage, in seconds.

    Attributes:
        number: pipeline rank.
        ranks: number of ranks in the stage.
        adamw: AdamW's step.
        ours: each variant, without and with a library's symmetric products.
        duplicated, distributed: Megatron's own Muon in these TP modes; equal without TP.
    """

    number: int
    ranks: int
    adamw: float
    ours: tuple[OurStep, ...]
    duplicated: float
    distributed: float


def priced_stage(
    flags: Namespace,
    config: MuonConfig,
    ranks: Ranks,
    number: int,
    hardware: Hardware,
    variants: Sequence[Changes] = VARIANTS,
) -> PricedStage:
    """Price one pipeline stage.

    Args:
        flags, config, ranks, number: see ``dry_run.stages.planned_on``.
        hardware: hardware of every rank.
        variants: changes of ``config``, each of which is priced.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: see ``stages.routes``; or
            the stage has no parameters (ValueError).
    """
    ours = []
    devices: list[Device] = ["cuda"]
    if hardware.symmetric_ratio < 1:
        devices.append("cuda_symmetric")
    for changes in variants:
        settings = dataclasses.replace(config, **changes)
        planned = planned_on(devices, flags, settings, ranks, number)
        for device, parts in zip(devices, planned, strict=True):
            optimizers = [optimizer_of(part) for part in parts]
            if not optimizers:
                raise ValueError(f"pipeline stage {number} has no parameters")
            iteration, dtype = (
                Numerics(settings, device).iteration,
                Numerics(settings, device).dtype,
            )
            step = price_step(optimizers, settings, hardware, device=device)
            ours.append(OurStep(iteration, dtype, device == "cuda_symmetric", step))
    if Numerics(config, "cuda").split != "off":  # Megatron's own takes whole matrices
        whole = dataclasses.replace(config, split_matrices="off")
        (planned,) = planned_on(["cuda"], flags, whole, ranks, number)
        optimizers = [optimizer_of(part) for part in planned]
    return PricedStage(
        number=number,
        ranks=optimizers[0].plan.size,
        adamw=price_adamw(optimizers, hardware),
        ours=tuple(ours),
        duplicated=price_layer_wise(optimizers, config, hardware, "duplicated").seconds,
        distributed=price_layer_wise(optimizers, config, hardware, "distributed").seconds,
    )


def priced_of(
    words: Sequence[str], hardware: Hardware, *more: Changes
) -> tuple[list[PricedStage], list[str]]:
    """The priced stages, and notes on them.

    Args:
        words: flags of ``megatron-muon plan``; those for hardware are ignored.
        hardware: hardware of every rank.
        more: changes of settings to price, in addition to ``VARIANTS``.
    """
    line = command_line(words)
    run, stage = line.settled(), line.given.stage
    numbers = range(run.ranks.pp) if stage is None else [stage]
    with megatron_is_quiet():
        stages = [
            priced_stage(run.flags, run.config, run.ranks, number, hardware, (*VARIANTS, *more))
            for number in numbers
        ]
    return stages, run.notes
