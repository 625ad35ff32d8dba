"""One pipeline stage of a run, planned and priced as ``megatron-muon plan`` does."""

from __future__ import annotations

import contextlib
import sys
import warnings

import megatron_muon.cpu.on  # noqa: F401 before what imports Megatron
from megatron_muon.lab.dry_run.optimizers import optimizer_of
from megatron_muon.lab.plan.command import command_line
from megatron_muon.lab.pricing.presets import H100
from megatron_muon.lab.pricing.step import StepTime, price_step
from megatron_muon.lab.pricing.work import Optimizer
from megatron_muon.lab.routes.model_flags import megatron_is_quiet
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.settings.config import MuonConfig
from support.virtual_gpu.dry_run import planned_on


def stage_of(words: str, device: Device = "cuda") -> tuple[MuonConfig, list[Optimizer]]:
    """The settings of a run, and the optimizers of its first stage or of that of
    ``--stage``.
    """
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        line = command_line(words.split())
        run, stage = line.settled(), line.args.stage or 0
        with megatron_is_quiet():
            (parts,) = planned_on([device], run, stage)
    return run.config, [optimizer_of(part) for part in parts]


def step_of(words: str, device: Device = "cuda") -> StepTime:
    """The step of that stage, priced for H100s."""
    config, optimizers = stage_of(words, device)
    return price_step(optimizers, config, H100, device=device)
