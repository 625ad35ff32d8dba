"""The device's results against a CPU's: equal bits where each operation rounds once,
else a bound.

Momentum, update and casts round once per operation and sum nothing, so any device makes
the same bits. A product sums in an order of its own: its error against the iteration in
float64 is bounded, and reported beside a CPU's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from megatron_muon.orthogonalize import triton_operations
from megatron_muon.orthogonalize.gram import gram_iteration
from megatron_muon.orthogonalize.iteration import takes_gram
from megatron_muon.orthogonalize.matmul import Products, numerics_on, plan_device
from megatron_muon.orthogonalize.newton_schulz import orthogonalize, standard_iteration
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.rules.fused import Fused, elementwise_on, trial
from megatron_muon.rules.muon import Foreach
from megatron_muon.settings.coefficients import NsDtype
from megatron_muon.settings.config import MuonConfig
from support.matrices import inputs

_SHAPES = ((256, 1024), (512, 512))
_FP32 = 1e-4  # a CPU's is below 2e-6; TF32, which has 10 bits, gives more than 1e-3
_CPU = torch.device("cpu")
_EXACT = Products(torch.float64, squares=torch.float64, held=torch.float64)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """One way of doing a step's elementwise work; ``differ`` names results of other
    bits.
    """

    way: str
    differ: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Error:
    """Errors of Newton-Schulz against float64: on the device, and a CPU's beside a
    GPU's.
    """

    name: str
    here: float
    there: float | None
    bound: float


@dataclass(frozen=True, slots=True)
class Bits:
    """What one rank computed."""

    elementwise: tuple[Elementwise, ...]  # empty on a CPU
    errors: tuple[Error, ...]  # by settings, then shape
    # settings whose second result differs, or whose direction of zeros is not zero
    twice: tuple[str, ...]


def run(kind: str) -> Bits:
    """All of it, on a rank."""
    device = torch.device(kind, 0) if kind == "cuda" else _CPU
    return Bits(
        tuple(elementwise(device)) if kind == "cuda" else (),
        tuple(
            error for config in configs_on(device) for error in errors(device, config)
        ),
        tuple(
            fault for config in configs_on(device) if (fault := twice(device, config))
        ),
    )


def elementwise(device: torch.device) -> Iterator[Elementwise]:
    """Momentum, update and casts in every way of doing them, against torch's on
    the CPU.
    """
    config = MuonConfig()
    ways: dict[str, Callable[[], Foreach]] = {"foreach": Foreach}
    numerics = Numerics(config)
    if elementwise_on(device, numerics) is Fused:
        ways["fused kernels"] = Fused
    expected = trial(Foreach(), _CPU, numerics)
    for name, make in ways.items():
        made = [tensor.cpu() for tensor in trial(make(), device, numerics)]
        same = [torch.equal(a, b) for a, b in zip(made, expected, strict=True)]
        bad = [
            result for result, is_same in zip(_TRIAL, same, strict=True) if not is_same
        ]
        yield Elementwise(name, tuple(bad))


# what ``trial`` returns
_TRIAL = ("momentum", "weights", "messages", "flags")


def errors(device: torch.device, config: MuonConfig) -> Iterator[Error]:
    """Errors against float64, by shape."""
    bound = _BOUNDS[Numerics(config, plan_device(device, config)).dtype]
    for rows, cols in _SHAPES:
        matrix = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows))
        here = _error(matrix.to(device), config)
        there = _error(matrix, config) if device.type != "cpu" else None
        yield Error(f"{name_of(config)}, {rows}x{cols}", here, there, bound)


# Twice a CPU's relative errors in bf16, fifty times in fp32; a wrong iteration's are
# near 1. A CPU may hold bf16's products in fp32, so its own error is no bound: a figure
# compares the two.
_BOUNDS = {"bf16": 0.05, "fp16": 0.01, "fp32": _FP32}


def _error(matrix: Tensor, config: MuonConfig) -> float:
    made = orthogonalize(matrix, config).double()
    exact = in_float64(matrix, config)
    return float((made - exact).norm() / exact.norm())


def errors_of_hard_inputs(job: tuple[str, tuple[int, int]]) -> dict[str, float]:
    """The largest error of each iteration and dtype over ``matrices.inputs``, on a
    rank.
    """
    kind, shape = job
    device = torch.device(kind)
    matrices = [matrix.float().to(kind) for _, matrix in inputs(*shape)]
    largest: dict[str, float] = {}
    for config in configs_on(device):
        every = [_error(matrix, config) for matrix in matrices]
        largest[name_of(config)] = (
            max(every) if all(map(math.isfinite, every)) else math.nan
        )
    return largest


def twice(device: torch.device, config: MuonConfig) -> str:
    """The same matrix twice gives the same bits; a matrix of zeros gives zeros."""
    matrix = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).to(
        device
    )
    one, two = (orthogonalize(matrix, config) for _ in range(2))
    zero = orthogonalize(torch.zeros_like(matrix), config)
    if not torch.equal(one, two):
        return f"{name_of(config)}: two results for one matrix differ in their bits"
    if zero.count_nonzero().item():
        return f"{name_of(config)}: the direction of a matrix of zeros is not zero"
    return ""


def configs_on(device: torch.device) -> list[MuonConfig]:
    """The settings of ``configs`` that a device has."""
    has_triton = device.type == "cuda" and triton_operations.has_triton()
    return [
        config
        for config in configs()
        if has_triton or config.symmetric_products != "triton"
    ]


def configs() -> Iterator[MuonConfig]:
    """Both iterations in every dtype, and by each maker of symmetric products."""
    for dtype in get_args(NsDtype):
        for iteration in ("standard", "gram"):
            config = MuonConfig(ns_dtype=dtype, ns_iteration=iteration)
            yield config
            if dtype != "fp32":
                yield dataclasses.replace(config, symmetric_products="triton")


def name_of(config: MuonConfig) -> str:
    """In words."""
    by = config.symmetric_products
    products = "" if by == "auto" else f", symmetric by {by}"
    return f"Newton-Schulz, {config.ns_dtype}, {config.ns_iteration}{products}"


def in_float64(matrix: Tensor, config: MuonConfig) -> Tensor:
    """The same iteration of the same fp32 matrix with every product in float64."""
    x = matrix.double()
    x = x / x.norm()
    numerics = numerics_on(matrix.device, config)
    if takes_gram(matrix.size(0), matrix.size(1), numerics):
        return gram_iteration(x, numerics.segments, _EXACT)
    return standard_iteration(x, numerics.steps, _EXACT)
