"""Bytes, memory, launches and time of a step, and its constants: predicted and
measured.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_muon.lab.accept.results import EXACT, Figure
from megatron_muon.lab.bench.step.measure import Measured, StepJob, measure
from megatron_muon.lab.bench.step.meter import Counted, Times
from megatron_muon.lab.pricing import step as pricing
from megatron_muon.lab.pricing.hardware import GIGA, MICRO, TERA, Hardware
from megatron_muon.lab.pricing.step import StepTime
from megatron_muon.lab.pricing.streams import WAITING
from megatron_muon.orthogonalize.matmul import (
    plan_device,
    symmetric_kernel,
)
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.orthogonalize.triton_operations import has_triton
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.update import SymmetricProducts
from support.gpu.link_speed import LinkJob, link_gbytes
from support.gpu.model import flags_of, on_ranks, row_of
from support.gpu.predicted import PredictedStep, solved
from support.gpu.settings import Settings
from support.virtual_gpu.step import virtual_gpu

Price = Callable[[Hardware], StepTime]
_ROUNDS = {"cpu": 1, "cuda": 7}
_SECONDS = 200.0
_EXCHANGE = ("muon-gather", "muon-scatter")
_ADAMW = (
    "The prediction has Transformer Engine's AdamW; torch's, without it, "
    "launches and moves more."
)
# Phases of the time model, the stopwatch's parts that are their time, and the constant
# that the phase depends on most.
_PHASES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str], ...] = (
    ("AdamW's part", (pricing.ADAMW,), ("muon-adamw",), ""),
    ("momentum", (pricing.MOMENTUM,), ("muon-momentum",), "memory_efficiency"),
    (
        "Newton-Schulz",
        (pricing.NEWTON_SCHULZ,),
        ("muon-newton_schulz",),
        "gemm_efficiency",
    ),
    ("update", (pricing.UPDATE,), ("muon-update",), "memory_efficiency"),
    ("exchange and staging", (pricing.STAGING, WAITING), _EXCHANGE, "node_efficiency"),
)


def device_of(settings: Settings) -> Device:
    """The kind of device that plans are for."""
    return plan_device(torch.device(settings.device), MuonConfig())


def measured_on_ranks(settings: Settings) -> list[Measured]:
    """Every rank's measurements of Muon's step."""
    flags = flags_of(settings)
    row = row_of("muon-contiguous")
    job = StepJob(flags, (row,), _ROUNDS[settings.device], launches=settings.gpus)
    return [each for (each,) in on_ranks(settings, measure, job, _SECONDS)]


def sent(expected: PredictedStep, ranks: Sequence[Measured]) -> list[Figure]:
    """The exchange's bytes: the plan's, the meter's, and those seen from outside."""
    figures = []
    for rank, (planned, of_rank) in enumerate(zip(expected.sent, ranks, strict=True)):
        counts = of_rank.counted.sent_bytes
        outside = counts.get("gather", 0) + counts.get("scatter", 0)
        for who, measured in (
            ("by our meter", of_rank.metered_bytes),
            ("from outside", outside),
        ):
            name = f"bytes that rank {rank} sends, {who}"
            figures.append(
                Figure(name, "B", planned, measured, *EXACT, corrects="The plan.")
            )
    return figures


def peak(expected: PredictedStep, ranks: Sequence[Measured]) -> list[Figure]:
    """Most bytes in a step above those at its start; ``torch.cuda``'s against the
    virtual GPU's.
    """
    return [
        Figure(
            f"peak memory of rank {report.rank} above its state",
            "B",
            report.peak_bytes,
            measured.peak_bytes,
            least=0.9,
            most=1.1,
            corrects=(
                "`virtual_gpu/memory.py`; cuBLAS' workspaces and fragmentation are not "
                "in it."
            ),
        )
        for report, measured in zip(expected.reports, ranks, strict=True)
    ]


def launches(expected: PredictedStep, ranks: Sequence[Measured]) -> list[Figure]:
    """Kernels and copies by torch's profiler against the virtual GPU's; memsets do not
    count.

    None where the profiler saw no kernel.
    """
    if not any(measured.launched.get("kernels") for measured in ranks):
        return []
    return [
        Figure(
            f"launches of rank {report.rank} in a step",
            "",
            report.launches,
            measured.launched.get("kernels", 0) + measured.launched.get("copies", 0),
            least=0.9,
            most=1.1,
            corrects=f"Counts of kernels in `virtual_gpu/device/launches.py`. {_ADAMW}",
        )
        for report, measured in zip(expected.reports, ranks, strict=True)
    ]


def constants(settings: Settings, hardware: Hardware) -> list[Figure]:
    """Constants of the time model, each by a measurement of its own.

    Without a GPU they are a virtual one's. Ranks over gloo take the place of the link
    between GPUs.
    """
    if settings.gpus:
        (figures,) = on_ranks(Settings("cuda", 1), _speeds, hardware, _SECONDS)
    else:
        with virtual_gpu():
            figures = list(speeds(hardware, torch.device("cuda")))
    if settings.ranks > 1:
        size = (64 << 20, 5) if settings.gpus else (1 << 10, 1)
        job = LinkJob(*size, gpu=settings.gpus)
        ranks = on_ranks(settings, link_gbytes, job, _SECONDS)
        figures.append(link(hardware, statistics.median(ranks)))
    return figures


def _speeds(hardware: Hardware) -> list[Figure]:
    """On a rank."""
    return list(speeds(hardware, torch.device("cuda", torch.cuda.current_device())))


def times(
    expected: PredictedStep,
    ranks: Sequence[Measured],
    hardware: Hardware,
    measured_constants: Sequence[Figure],
) -> list[Figure]:
    """The time model's phases against the stopwatch's, with the constants that were
    measured.

    A phase is priced with these, too, so that what is left over is the phase's own.
    """
    both = hardware, with_measured(hardware, measured_constants)
    price = expected.price
    figures: list[Figure] = []
    total = 0.0
    alone = "exchange and staging" if len(ranks) == 1 else ""
    for name, phases, parts, constant in _PHASES:
        if name == alone:
            continue
        measured = max(_median(rank, parts) for rank in ranks)
        total += measured
        why = "See the constants measured one by one.", "" if constant else _ADAMW
        figures += _figures(
            name, partial(_of_phases, price, phases), measured, both, why, constant
        )
    sums = "The sum of the phases, each on the rank where it takes longest."
    figures += _figures(
        "step without what AdamW has alike",
        lambda one: 1e3 * price(one).seconds, total, both, (sums, sums),
    )  # fmt: skip
    more = "The measured time also has the gather of parameters."
    figures += _figures(
        "whole step, with norm and copy", lambda one: 1e3 * expected.whole(one),
        max(statistics.median(each.ms for each in rank.times) for rank in ranks),
        both, (more, more),
    )  # fmt: skip
    _, of_host = _figures(
        "the host launches a step", lambda one: 1e3 * expected.host(one),
        max(rank.host_ms for rank in ranks), both, ("", f"{more} It waits for the norm."),
    )  # fmt: skip
    return [*figures, of_host]


def _of_phases(price: Price, phases: Sequence[str], hardware: Hardware) -> float:
    step = price(hardware)
    return 1e3 * sum(step.phases[phase] for phase in phases)


def _figures(
    name: str,
    ms: Callable[[Hardware], float],
    measured: float,
    hardware: tuple[Hardware, Hardware],
    why: tuple[str, str],
    constant: str = "",
) -> list[Figure]:
    """A time as the preset predicts it, and as the measured constants do.

    Only the second names a constant: with the first, the measured constants explain a
    difference.
    """
    stated, own = hardware
    with_own = f"{name}, with measured constants"
    value = solved(own, constant, ms, measured) if constant else None
    return [
        Figure(name, "ms", ms(stated), measured, corrects=why[0]),
        Figure(
            with_own,
            "ms",
            ms(own),
            measured,
            constant=constant,
            value=value,
            corrects=why[1],
        ),
    ]


def as_predicted_on(
    expected: PredictedStep, hardware: Hardware, rank: int = 0, **changes: Any
) -> Measured:
    """What a rank would measure if the time model with this hardware were true."""
    step = expected.price(hardware)
    parts = {
        part: 1e3 * sum(step.phases[phase] for phase in phases) / len(own)
        for _, phases, own, _ in _PHASES
        for part in own
    }
    made = Measured(
        times=[Times(1e3 * expected.whole(hardware), parts, 0.0)],
        counted=Counted({"gather": expected.sent[rank], "scatter": 0}),
        metered_bytes=expected.sent[rank],
        peak_bytes=expected.reports[rank].peak_bytes,
        launched={
            "kernels": expected.reports[rank].launches - 3,
            "copies": 3,
            "memsets": 9,
        },
        host_ms=1e3 * expected.host(hardware),
    )
    return dataclasses.replace(made, **changes)


def with_measured(hardware: Hardware, measured_constants: Sequence[Figure]) -> Hardware:
    """The hardware with the constants that were measured."""
    values = {
        figure.constant: figure.value
        for figure in measured_constants
        if figure.constant
    }
    known = {
        name: value for name, value in values.items() if value is not None and value > 0
    }
    return hardware.with_values(known, "measured by tests/gpu")


def _median(rank: Measured, parts: Sequence[str]) -> float:
    return statistics.median(
        sum(times.parts_ms.get(part, 0.0) for part in parts) for times in rank.times
    )


_SIDES = 1024, 2048, 4096, 8192  # of symmetric products
_SIDE = 8192  # of the product's matrices
_ELEMENTS = 1 << 28  # of a copy in fp32: 1 GiB, which no cache holds
# kernels of one element; with the products below, fewer than a queue of 1024 holds
_SMALL = 800
_REPEATS = 5
_COVER = (
    40  # products that run while small kernels are put in line: about 60 ms on an H100
)


def speeds(hardware: Hardware, device: torch.device) -> Iterator[Figure]:
    """All of them that one GPU can measure alone."""
    for one in (product, memory, launch, kernel):
        yield one(hardware, device)
    yield from symmetric(hardware, device)


def product(hardware: Hardware, device: torch.device) -> Figure:
    """A large product in bf16: ``gemm_efficiency``."""
    left, right = (
        torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    seconds = _seconds(lambda: torch.mm(left, right))
    reached = 2 * _SIDE**3 / seconds / TERA
    name = f"product {_SIDE}x{_SIDE} in bf16"
    return share(name, "TFLOP/s", reached, hardware, "gemm_efficiency", "dense_tflops")


def symmetric(hardware: Hardware, device: torch.device) -> Iterator[Figure]:
    """XXᵀ by quack-kernels and by triton, where they are installed, beside torch's
    product: ``symmetric_ratio``.
    """
    makers: tuple[SymmetricProducts, ...] = ("auto", "triton")
    for maker in makers if has_triton() else makers[:1]:
        config = MuonConfig(symmetric_products=maker)
        multiply = symmetric_kernel(device, config)
        if multiply is None:
            continue
        by = "triton" if maker == "triton" else "quack-kernels"
        for side in _SIDES:
            x, out = (
                torch.randn(side, side, device=device, dtype=torch.bfloat16)
                for _ in range(2)
            )
            theirs = _seconds(partial(multiply, x, x.mT, None, 1.0, 1.0, out))
            ratio = theirs / _seconds(partial(torch.mm, x, x.mT, out=out))
            name = f"symmetric product {side}x{side} by {by}, over torch's time"
            expected = hardware.symmetric_ratio if side == _SIDE else None
            # the timed step has the products of auto
            constant = "symmetric_ratio" if expected and maker == "auto" else ""
            yield Figure(name, "", expected, ratio, constant=constant, value=ratio)


def memory(hardware: Hardware, device: torch.device) -> Figure:
    """A large copy: ``memory_efficiency``."""
    source = torch.zeros(_ELEMENTS, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: torch.add(source, 1.0, out=target))
    reached = 2 * source.nbytes / seconds / GIGA
    constants = "memory_efficiency", "memory_gbytes"
    return share("memory, reads and writes", "GB/s", reached, hardware, *constants)


def launch(hardware: Hardware, device: torch.device) -> Figure:
    """The host's time per small operation: ``launch_us``."""
    one = torch.zeros(1, device=device)
    times = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        _small(one)
        times.append((time.perf_counter() - start) / _SMALL)
        torch.cuda.synchronize()
    return plain(
        "a launch, on the host", sorted(times)[_REPEATS // 2], hardware, "launch_us"
    )


def kernel(hardware: Hardware, device: torch.device) -> Figure:
    """The GPU's time per small kernel, all of them in line before the first runs:
    ``kernel_us``.
    """
    one = torch.zeros(1, device=device)
    left = torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(_REPEATS):
        for _ in range(_COVER):
            torch.mm(left, left)
        times.append(_between(lambda: _small(one)) / _SMALL)
    return plain("a small kernel, with its gap", min(times), hardware, "kernel_us")


def link(hardware: Hardware, gbytes: float) -> Figure:
    """The all-to-all of all ranks: ``node_efficiency``."""
    constants = "node_efficiency", "node_gbytes"
    return share("all-to-all inside the node", "GB/s", gbytes, hardware, *constants)


def share(
    name: str, unit: str, reached: float, hardware: Hardware, efficiency: str, peak: str
) -> Figure:
    """A rate against a peak and a share of it, by the names of both constants; above
    the peak, the peak is what is wrong.
    """
    stated = getattr(hardware, efficiency)
    of_peak = reached / getattr(hardware, peak)
    constant, value = efficiency, of_peak
    if of_peak > 1:
        constant, value = peak, reached / stated
    predicted = getattr(hardware, peak) * stated
    rounded = float(f"{value:.4g}")
    return Figure(name, unit, predicted, reached, constant=constant, value=rounded)


def plain(name: str, seconds: float, hardware: Hardware, constant: str) -> Figure:
    """A figure whose measured time, in µs, is itself the constant."""
    measured = float(f"{seconds / MICRO:.4g}")
    predicted = float(getattr(hardware, constant))
    return Figure(name, "us", predicted, measured, constant=constant, value=measured)


def _small(one: Tensor) -> None:
    for _ in range(_SMALL):
        one.add_(1.0)


def _seconds(action: Callable[[], Any]) -> float:
    """The median time of an action on the GPU, after one that compiles it and warms
    caches.
    """
    action()
    return sorted(_between(action) for _ in range(_REPEATS))[_REPEATS // 2]


def _between(action: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
