"""Bytes, memory, launches and time of a step: predicted, and measured on the device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron_muon.lab.accept.checks import speeds
from megatron_muon.lab.accept.checks.model import flags_of, row_of, task_of
from megatron_muon.lab.accept.checks.predicted import PredictedStep, most, predicted, solved
from megatron_muon.lab.accept.outcome import EXACT, Figure, Finding
from megatron_muon.lab.accept.settings import Settings
from megatron_muon.lab.bench.step.measure import Measured, StepJob, measure
from megatron_muon.lab.pricing import step as pricing
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.step import StepTime
from megatron_muon.lab.pricing.streams import WAITING
from megatron_muon.orthogonalize.iteration import Device

Price = Callable[[Hardware], StepTime]
_ROUNDS = {"cpu": 1, "cuda": 7}
_SECONDS = 200.0
_EXCHANGE = ("muon-gather", "muon-scatter")
# Phases of the time model, the stopwatch's parts that are their time, and the constant that the
# phase depends on most.
_PHASES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], str], ...] = (
    ("AdamW's part", (pricing.ADAMW,), ("muon-adamw",), "memory_efficiency"),
    ("momentum", (pricing.MOMENTUM,), ("muon-momentum",), "memory_efficiency"),
    ("Newton-Schulz", (pricing.NEWTON_SCHULZ,), ("muon-newton_schulz",), "gemm_efficiency"),
    ("update", (pricing.UPDATE,), ("muon-update",), "memory_efficiency"),
    ("exchange and staging", (pricing.STAGING, WAITING), _EXCHANGE, "node_efficiency"),
)


def run(settings: Settings) -> list[Finding]:
    """Predict in this process, measure on the ranks."""
    from megatron_muon.lab.bench.ranks import run_ranks
    from megatron_muon.lab.pricing.presets import hardware_of

    flags, row = flags_of(settings), row_of("muon-contiguous")
    device = device_of(settings)
    expected = predicted(flags, row.config, device, on_virtual_gpu=settings.device != "cpu")
    hardware = hardware_of(settings.hardware, settings.changes)
    if settings.device == "virtual":
        return [*on_virtual_gpu(expected, hardware), *_not_measured(settings, ("bytes",))]
    job = StepJob(flags, (row,), _ROUNDS[settings.device], launches=settings.gpus)
    ranks = [each for (each,) in run_ranks(task_of(settings, measure, job, _SECONDS))]
    made = [sent(expected, ranks)]
    if not settings.gpus:
        return [*made, *_not_measured(settings)]
    measured_constants = tuple(constants(settings, hardware))
    return [
        *made,
        peak(expected, ranks),
        launches(expected, ranks),
        Finding("constants of the time model", "ok", "measured one by one", measured_constants),
        times(expected.price, ranks, hardware, measured_constants),
    ]


def device_of(settings: Settings) -> Device:
    """The kind of device that plans are for."""
    from megatron_muon.orthogonalize.matmul import plan_device

    if settings.device == "virtual":
        return "cuda"
    return plan_device(torch.device(settings.device))


def _not_measured(settings: Settings, more: Sequence[str] = ()) -> Iterator[Finding]:
    for name in (*more, "peak memory", "launches", "time"):
        yield Finding(name, "not run", settings.why_no_gpu)


def sent(expected: PredictedStep, ranks: Sequence[Measured]) -> Finding:
    """The exchange's bytes: the plan's, the meter's, and those seen from outside."""
    figures, faults = [], []
    for rank, (planned, of_rank) in enumerate(zip(expected.sent, ranks, strict=True)):
        counts = of_rank.counted.sent_bytes
        outside = counts.get("gather", 0) + counts.get("scatter", 0)
        for who, measured in (("by our meter", of_rank.metered_bytes), ("from outside", outside)):
            name = f"bytes that rank {rank} sends, {who}"
            figure = Figure(name, "B", planned, measured, *EXACT, corrects="The exchange plan.")
            figures.append(figure)
            if not figure.as_predicted:
                faults.append(f"{name}: {measured:,}, in the plan {planned:,}")
    if faults:
        return Finding("bytes", "FAILED", "; ".join(faults), tuple(figures))
    return Finding("bytes", "ok", "those of the plan, on every rank", tuple(figures))


def on_virtual_gpu(expected: PredictedStep, hardware: Hardware) -> Iterator[Finding]:
    """The plan and the time model against the virtual GPU, which runs the step's code."""
    figures = [
        Figure(
            f"bytes that rank {report.rank} sends, on the virtual GPU", "B", planned, report.sent,
            *EXACT, corrects="The exchange plan.",
        )
        for planned, report in zip(expected.sent, expected.reports, strict=True)
    ]  # fmt: skip
    bad = [figure.name for figure in figures if not figure.as_predicted]
    yield (
        Finding("bytes of the plan", "FAILED", f"others: {'; '.join(bad)}", tuple(figures))
        if bad
        else Finding("bytes of the plan", "ok", "on the virtual GPU", tuple(figures))
    )
    price = expected.price(hardware)
    yield Finding(
        "the time model against the virtual GPU",
        "ok",
        "no time is measured",
        (
            Figure(
                "launches of Muon and AdamW, most of a rank",
                "",
                price.launches,
                most(expected.reports, "muon_launches"),
                corrects="Counts of launches in `pricing/kernels.py` and `pricing/step.py`.",
            ),
            Figure("step without what AdamW has alike", "ms", 1e3 * price.seconds),
            Figure("peak memory above the state", "B", most(expected.reports, "peak_bytes")),
        ),
    )


def peak(expected: PredictedStep, ranks: Sequence[Measured]) -> Finding:
    """Most bytes in a step above those at its start; ``torch.cuda``'s against the virtual GPU's."""
    figures = tuple(
        Figure(
            f"peak memory of rank {report.rank} above its state",
            "B",
            report.peak_bytes,
            measured.peak_bytes,
            least=0.9,
            most=1.1,
            corrects="`virtual_gpu/memory.py`; cuBLAS' workspaces and fragmentation are not in it.",
        )
        for report, measured in zip(expected.reports, ranks, strict=True)
    )
    return Finding("peak memory", "ok", "torch.cuda.max_memory_allocated", figures)


def launches(expected: PredictedStep, ranks: Sequence[Measured]) -> Finding:
    """Kernels and copies by torch's profiler against the virtual GPU's; memsets do not count."""
    figures = tuple(
        Figure(
            f"launches of rank {report.rank} in a step",
            "",
            report.launches,
            measured.launched.get("kernels", 0) + measured.launched.get("copies", 0),
            least=0.9,
            most=1.1,
            corrects="Counts of kernels in `virtual_gpu/device/launches.py`.",
        )
        for report, measured in zip(expected.reports, ranks, strict=True)
    )
    if not any(measured.launched.get("kernels") for measured in ranks):
        why = "torch's profiler saw no kernel: it needs CUPTI, and permission to use it"
        return Finding("launches", "not run", why)
    return Finding("launches", "ok", "by torch's profiler", figures)


def constants(settings: Settings, hardware: Hardware) -> Iterator[Figure]:
    """Constants of the time model, each by a measurement of its own."""
    from megatron_muon.lab.bench.ranks import run_ranks
    from megatron_muon.lab.bench.speeds import SpeedsJob
    from megatron_muon.lab.bench.speeds import measure as measure_speeds

    (alone,) = run_ranks(task_of(Settings("cuda", 1), _speeds, hardware, _SECONDS))
    yield from alone
    if settings.ranks > 1:
        job = SpeedsJob(row_of("muon-contiguous").config, (512, 2048), 64 << 20, 5, gpu=True)
        measurements = run_ranks(task_of(settings, measure_speeds, job, _SECONDS))
        yield speeds.link(
            hardware, statistics.median(each.link_gbytes or 0.0 for each in measurements)
        )


def _speeds(hardware: Hardware) -> list[Figure]:
    """On a rank."""
    return list(speeds.speeds(hardware, torch.device("cuda", torch.cuda.current_device())))


def times(
    price: Price,
    ranks: Sequence[Measured],
    hardware: Hardware,
    measured_constants: Sequence[Figure],
) -> Finding:
    """The time model's phases against the stopwatch's, with the constants that were measured.

    Args:
        price: ``PredictedStep.price``.
        ranks: measurements of each rank.
        hardware: hardware of the predictions.
        measured_constants: each by a measurement of its own. A phase is priced with them, too, so
            that what is left over is the phase's own.
    """
    own = with_measured(hardware, measured_constants)
    figures: list[Figure] = []
    total = 0.0
    for name, phases, parts, constant in _PHASES:
        measured = max(_median(rank, parts) for rank in ranks)
        total += measured
        figures += _phase(name, phases, constant, measured, price, (hardware, own))
    figures += _whole("step without what AdamW has alike", total, price, (hardware, own))
    host = max(rank.host_ms for rank in ranks)
    figures += _host(host, price, (hardware, own))
    text = f"phases on {hardware.name}, then with the constants measured here"
    return Finding("time", "ok", text, tuple(figures))


def with_measured(hardware: Hardware, measured_constants: Sequence[Figure]) -> Hardware:
    """The hardware with the constants that were measured."""
    values = {figure.constant: figure.value for figure in measured_constants if figure.constant}
    known = {name: value for name, value in values.items() if value is not None and value > 0}
    return hardware.with_values(known, "measured by accept")


def _median(rank: Measured, parts: Sequence[str]) -> float:
    return statistics.median(
        sum(times.parts_ms.get(part, 0.0) for part in parts) for times in rank.times
    )


def _phase(
    name: str,
    phases: Sequence[str],
    constant: str,
    measured: float,
    price: Price,
    hardware: tuple[Hardware, Hardware],
) -> Iterator[Figure]:
    """A phase as the preset predicts it, and as the measured constants do.

    Only the second names a constant: with the first, the measured constants explain a difference.
    """

    def ms(one: Hardware) -> float:
        step = price(one)
        return 1e3 * sum(step.phases[phase] for phase in phases)

    stated, own = hardware
    yield Figure(
        f"{name}", "ms", ms(stated), measured, corrects="See the constants measured one by one."
    )
    yield Figure(
        f"{name}, with measured constants",
        "ms",
        ms(own),
        measured,
        constant=constant,
        value=solved(own, constant, ms, measured),
    )


def _whole(
    name: str, measured: float, price: Price, hardware: tuple[Hardware, Hardware]
) -> Iterator[Figure]:
    stated, own = hardware
    why = "The sum of the phases, each on the rank where it takes longest."
    yield Figure(name, "ms", 1e3 * price(stated).seconds, measured, corrects=why)
    with_own = f"{name}, with measured constants"
    yield Figure(with_own, "ms", 1e3 * price(own).seconds, measured, corrects=why)


def _host(measured: float, price: Price, hardware: tuple[Hardware, Hardware]) -> Iterator[Figure]:
    """The host's time of a step, whose norm and gather of parameters the model leaves out."""

    def ms(one: Hardware) -> float:
        return 1e3 * price(one).host

    yield Figure(
        "the host launches a step, with measured constants",
        "ms",
        ms(hardware[1]),
        measured,
        constant="phase_us",
        value=solved(hardware[1], "phase_us", ms, measured),
        corrects="The measured time also has the gradient norm and the gather of parameters.",
    )
