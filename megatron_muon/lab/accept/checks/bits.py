"""The device's results against a CPU's: equal bits where each operation rounds once, else a bound.

Momentum, update and casts round once per operation and sum nothing, so any device makes the same
bits. A product sums in an order of its own: its error against the iteration in float64 is bounded,
and reported beside a CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import torch
from torch import Tensor

from megatron_muon.coefficients import NsDtype
from megatron_muon.config import MuonConfig
from megatron_muon.lab.accept.outcome import Figure, Finding
from megatron_muon.lab.accept.settings import Settings
from megatron_muon.lab.bench.newton_schulz.accuracy import in_float64
from megatron_muon.orthogonalize.iteration import dtype_of
from megatron_muon.orthogonalize.matmul import plan_device
from megatron_muon.orthogonalize.newton_schulz import orthogonalize
from megatron_muon.runtime.fused import Fused, elementwise_on, trial
from megatron_muon.runtime.update import Elementwise, Foreach

# Errors of the same iteration on two devices differ by the order of sums alone. The two iterations
# differ by more: the largest factor seen is 3 (``newton_schulz``).
_FACTOR = 3.0
_SHAPES = ((256, 1024), (512, 512))
_FP32 = 1e-4  # a CPU's is below 2e-6; TF32, which has 10 bits, gives more than 1e-3
_CPU = torch.device("cpu")


def run(settings: Settings) -> list[Finding]:
    """Elementwise work, Newton-Schulz, and the same twice."""
    if settings.device == "virtual":
        return [Finding("bits", "not run", settings.why_no_gpu)]
    device = torch.device("cuda" if settings.gpus else "cpu")
    return [
        *elementwise(device),
        *(newton_schulz(device, config) for config in _configs()),
        *(twice(device, config) for config in _configs()),
    ]


def elementwise(device: torch.device) -> Iterator[Finding]:
    """Momentum, norm, update and casts in every way of doing them, against torch's on the CPU."""
    ways: dict[str, Callable[[], Elementwise]] = {"foreach": Foreach}
    config = MuonConfig()
    if elementwise_on(device, config) is Fused:
        ways["fused kernels"] = Fused
    else:
        why = "no GPU" if device.type == "cpu" else "triton is not installed"
        yield Finding("momentum, norm and update: fused kernels", "not run", why)
    expected = trial(Foreach(), _CPU, config)
    for name, make in ways.items():
        title = f"momentum, norm and update: {name}"
        if device.type == "cpu":
            yield Finding(title, "not run", "no GPU whose bits a CPU's could be compared with")
            continue
        made = [tensor.cpu() for tensor in trial(make(), device, config)]
        same = [torch.equal(a, b) for a, b in zip(made, expected, strict=True)]
        bad = [name for name, is_same in zip(_TRIAL, same, strict=True) if not is_same]
        yield (
            Finding(title, "FAILED", f"other bits than a CPU's in {', '.join(bad)}")
            if bad
            else Finding(title, "ok", "bits equal to a CPU's after two steps")
        )


# what ``trial`` returns
_TRIAL = ("momentum", "weights", "messages", "flags", "matrices over their norms")


def newton_schulz(device: torch.device, config: MuonConfig) -> Finding:
    """The error against float64, and on a GPU its ratio to a CPU's."""
    name = f"Newton-Schulz, {config.ns_dtype}, {config.ns_iteration}"
    bound = _BOUNDS[dtype_of(config, plan_device(device))]
    figures = []
    faults = []
    for rows, cols in _SHAPES:
        matrix = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows))
        here = _error(matrix.to(device), config)
        there = _error(matrix, config) if device.type != "cpu" else None
        figures.append(
            Figure(
                f"{name}, {rows}x{cols}: error to float64",
                "",
                predicted=there,
                measured=here,
                least=0.0,
                most=_FACTOR,
                corrects="The error that a CPU makes was taken as the prediction.",
            )
        )
        if not here <= bound:
            faults.append(f"{rows}x{cols}: error {here:.2e}, not below {bound:g}")
    if faults:
        return Finding(name, "FAILED", "; ".join(faults), tuple(figures))
    text = f"error to float64 below {bound:g}"
    return Finding(name, "ok", text, tuple(figures))


# Twice a CPU's relative errors in bf16, fifty times in fp32; a wrong iteration's are near 1. A CPU
# may hold bf16's products in fp32, so its own error is no bound: a figure compares the two.
_BOUNDS = {"bf16": 0.05, "fp16": 0.01, "fp32": _FP32}


def _error(matrix: Tensor, config: MuonConfig) -> float:
    made = orthogonalize(matrix, config).double()
    exact = in_float64(matrix, config)
    return float((made - exact).norm() / exact.norm())


def twice(device: torch.device, config: MuonConfig) -> Finding:
    """The same matrix twice gives the same bits; a matrix of zeros gives zeros."""
    name = f"the same twice, {config.ns_dtype}, {config.ns_iteration}"
    matrix = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).to(device)
    one, two = (orthogonalize(matrix, config) for _ in range(2))
    zero = orthogonalize(torch.zeros_like(matrix), config)
    if not torch.equal(one, two):
        return Finding(name, "FAILED", "two results for one matrix differ in their bits")
    if zero.count_nonzero().item():
        return Finding(name, "FAILED", "the direction of a matrix of zeros is not zero")
    return Finding(name, "ok", "bits equal; zero gives zero")


def _configs() -> Iterator[MuonConfig]:
    for dtype in get_args(NsDtype):
        for iteration in ("standard", "gram"):
            yield MuonConfig(ns_dtype=dtype, ns_iteration=iteration)
