"""A step's predicted cost: by its plan, the virtual GPU and the time model."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from megatron_muon.lab.bench.step.rows import OPTIONS
from megatron_muon.lab.plan.on_host import TORCH_ADAMW
from megatron_muon.lab.pricing.hardware import Hardware, least_of, most_of
from megatron_muon.lab.pricing.kernels import stream
from megatron_muon.lab.pricing.step import (
    StepTime,
    adamw,
    around,
    host_python,
    price_step,
)
from megatron_muon.lab.pricing.work import Optimizer, total
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.settings.config import MuonConfig
from support.virtual_gpu.dry_run import Run, optimizer_of, planned_on, ranks_of
from support.virtual_gpu.megatron import OptimizerSettings, record_training
from support.virtual_gpu.rank_report import RankReport, report_of

_SPAN = (
    1000.0  # a constant is looked for from a thousandth to a thousand times its value
)
_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """The predictions of a step."""

    sent: list[int]  # bytes that each rank sends in the exchange, by the plan
    # what each rank does, on the virtual GPU; empty for a CPU
    reports: list[RankReport]
    price: Callable[[Hardware], StepTime]  # the step's times on some hardware
    optimizers: list[Optimizer]

    def host(self, hardware: Hardware) -> float:
        """Seconds in which the host launches Megatron's step."""
        return self.price(hardware).host + host_python(self.optimizers, hardware)

    def whole(self, hardware: Hardware) -> float:
        """Seconds of Megatron's step, which clips nothing here.

        Without Transformer Engine AdamW is torch's, of several passes.
        """
        parts = around(self.optimizers, hardware)
        seconds = self.price(hardware).seconds + parts["norm"] + parts["copy"]
        if find_spec("transformer_engine") is None:
            rest = max(total([one.rest for one in self.optimizers]))
            passes = stream(hardware, rest * TORCH_ADAMW)
            seconds += passes.seconds - adamw(hardware, rest).seconds
        return max(seconds, self.host(hardware))


def predicted(flags: Namespace, config: MuonConfig, device: Device) -> PredictedStep:
    """Predict the step of every rank of a model in one pipeline stage."""
    ranks = ranks_of(flags)
    (parts,) = planned_on([device], Run(flags, config, ranks), 0)
    optimizers = [optimizer_of(part) for part in parts]
    sent = [
        sum(each)
        for each in zip(*(one.plan.sent_bytes() for one in optimizers), strict=True)
    ]
    steps = range(ranks.world if device == "cuda" else 0)
    return PredictedStep(
        sent,
        [report(flags, config, rank) for rank in steps],
        lambda hardware: price_step(optimizers, config, hardware, device=device),
        optimizers,
    )


def report(flags: Namespace, config: MuonConfig, rank: int) -> RankReport:
    """A rank's second step, on the virtual GPU."""
    training = OptimizerSettings(clip_grad=OPTIONS["clip_grad"])
    trained = record_training(flags, ranks_of(flags), rank, config, training)
    return report_of(trained.recording)


def solved(
    hardware: Hardware,
    constant: str,
    time: Callable[[Hardware], float],
    measured: float,
) -> float | None:
    """The value of a constant with which the model's ``time`` is as measured, if there
    is any.
    """
    at = float(getattr(hardware, constant))
    low = max(at / _SPAN, least_of(constant))
    high = min(at * _SPAN, most_of(constant))

    def of(value: float) -> float:
        return time(hardware.with_values({constant: value}, "searched"))

    ends = of(low), of(high)
    if not min(ends) <= measured <= max(ends) or ends[0] == ends[1]:
        return None
    rises = ends[1] > ends[0]
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if (of(middle) < measured) is rises:
            low = middle
        else:
            high = middle
    return float(f"{math.sqrt(low * high):.4g}")
