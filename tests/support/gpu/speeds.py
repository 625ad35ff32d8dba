"""Measurements of one constant of the time model each, on a GPU.

Every function takes the hardware that was predicted with, and gives a Figure with the constant's
measured value. Times of the GPU are between events; the host never waits inside what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_muon.lab.accept.results import Figure
from megatron_muon.lab.pricing.hardware import GIGA, MICRO, TERA, Hardware

_SIDE = 8192  # of the product's matrices
_ELEMENTS = 1 << 28  # of a copy in fp32: 1 GiB, which no cache holds
_SMALL = 800  # kernels of one element; with the products below, fewer than a queue of 1024 holds
_ROUNDS = 5
_COVER = 40  # products that run while small kernels are put in line: about 60 ms on an H100


def speeds(hardware: Hardware, device: torch.device) -> Iterator[Figure]:
    """All of them that one GPU can measure alone."""
    for measure in (product, memory, launch, kernel):
        yield measure(hardware, device)


def product(hardware: Hardware, device: torch.device) -> Figure:
    """A large product in bf16: ``gemm_efficiency``."""
    left, right = (torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = _seconds(lambda: torch.mm(left, right))
    reached = 2 * _SIDE**3 / seconds / TERA
    return share(
        f"product {_SIDE}x{_SIDE} in bf16", "TFLOP/s", reached, hardware.dense_tflops,
        hardware.gemm_efficiency, ("gemm_efficiency", "dense_tflops"),
    )  # fmt: skip


def memory(hardware: Hardware, device: torch.device) -> Figure:
    """A large copy: ``memory_efficiency``."""
    source = torch.zeros(_ELEMENTS, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: torch.add(source, 1.0, out=target))
    reached = 2 * source.nbytes / seconds / GIGA
    return share(
        "memory, reads and writes", "GB/s", reached, hardware.memory_gbytes,
        hardware.memory_efficiency, ("memory_efficiency", "memory_gbytes"),
    )  # fmt: skip


def launch(hardware: Hardware, device: torch.device) -> Figure:
    """The host's time per small operation: ``launch_us``."""
    one = torch.zeros(1, device=device)
    times = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        _small(one)
        times.append((time.perf_counter() - start) / _SMALL)
        torch.cuda.synchronize()
    return plain("a launch, on the host", sorted(times)[_ROUNDS // 2], hardware, "launch_us")


def kernel(hardware: Hardware, device: torch.device) -> Figure:
    """The GPU's time per small kernel, all of them in line before the first runs: ``kernel_us``."""
    one = torch.zeros(1, device=device)
    left = torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(_ROUNDS):
        for _ in range(_COVER):
            torch.mm(left, left)
        times.append(_between(lambda: _small(one)) / _SMALL)
    return plain("a small kernel, with its gap", min(times), hardware, "kernel_us")


def link(hardware: Hardware, gbytes: float) -> Figure:
    """The all-to-all of all ranks: ``node_efficiency``."""
    return share(
        "all-to-all inside the node", "GB/s", gbytes, hardware.node_gbytes,
        hardware.node_efficiency, ("node_efficiency", "node_gbytes"),
    )  # fmt: skip


def share(
    name: str, unit: str, reached: float, peak: float, efficiency: float, constants: tuple[str, str]
) -> Figure:
    """A rate against a peak and a share of it; above the peak, the peak is what is wrong."""
    of_peak = reached / peak
    constant, value = (
        (constants[0], of_peak) if of_peak <= 1 else (constants[1], reached / efficiency)
    )
    return Figure(
        name, unit, peak * efficiency, reached, constant=constant, value=float(f"{value:.4g}")
    )


def plain(name: str, seconds: float, hardware: Hardware, constant: str) -> Figure:
    """A figure whose measured time, in µs, is itself the constant."""
    measured = float(f"{seconds / MICRO:.4g}")
    predicted = float(getattr(hardware, constant))
    return Figure(name, "us", predicted, measured, constant=constant, value=measured)


def _small(one: torch.Tensor) -> None:
    for _ in range(_SMALL):
        one.add_(1.0)


def _seconds(action: Callable[[], Any]) -> float:
    """The median time of an action on the GPU, after one that compiles it and warms caches."""
    action()
    return sorted(_between(action) for _ in range(_ROUNDS))[_ROUNDS // 2]


def _between(action: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
