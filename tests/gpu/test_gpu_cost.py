"""Bytes, memory, launches and time of a step: predicted, and measured on the device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_muon.lab.accept.results import EXACT, Figure
from megatron_muon.lab.bench.step.measure import Measured
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.presets import hardware_of
from support.gpu import cost
from support.gpu.model import flags_of, row_of
from support.gpu.predicted import PredictedStep, predicted
from support.gpu.settings import Check, Report, Settings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def hardware(settings: Settings) -> Hardware:
    return hardware_of(settings.hardware, settings.changes)


@pytest.fixture(scope="module")
def on_gpu(settings: Settings) -> PredictedStep:
    return predicted(flags_of(settings), row_of("muon-contiguous").config, "cuda")


@pytest.fixture(scope="module")
def measured(settings: Settings) -> list[Measured]:
    return cost.measured_on_ranks(settings)


@pytest.fixture(scope="module")
def of_gpu(
    settings: Settings,
    measured: list[Measured],
    on_gpu: PredictedStep,
    hardware: Hardware,
) -> Sequence[Measured]:
    """Without a GPU what the prediction would measure: it runs the code, and is not
    reported.
    """
    if settings.gpus:
        return measured
    ranks = range(settings.ranks)
    return [cost.as_predicted_on(on_gpu, hardware, rank) for rank in ranks]


@pytest.fixture(scope="module")
def constants(settings: Settings, hardware: Hardware) -> list[Figure]:
    return cost.constants(settings, hardware)


def test_bytes_are_those_of_the_plan(
    settings: Settings, measured: list[Measured], on_gpu: PredictedStep, report: Report
) -> None:
    config = row_of("muon-contiguous").config
    device = cost.device_of(settings)
    plan = on_gpu if device == "cuda" else predicted(flags_of(settings), config, device)
    figures = cost.sent(plan, measured)
    report(*figures, text="on every rank")
    assert [figure for figure in figures if not figure.as_predicted] == []


def test_the_virtual_gpu_sends_the_plans_bytes(
    on_gpu: PredictedStep, report: Report
) -> None:
    figures = [
        Figure(
            f"bytes of rank {each.rank} on the virtual GPU",
            "B",
            planned,
            each.sent,
            *EXACT,
        )
        for planned, each in zip(on_gpu.sent, on_gpu.reports, strict=True)
    ]
    report(*figures, text="on every rank")
    assert [figure for figure in figures if not figure.as_predicted] == []


def test_peak_memory_is_measured(
    on_gpu: PredictedStep, of_gpu: Sequence[Measured], needs_gpu: Check, report: Report
) -> None:
    figures = cost.peak(on_gpu, of_gpu)
    assert all(figure.measured for figure in figures)
    needs_gpu()
    report(*figures, text="torch.cuda.max_memory_allocated")


def test_launches_are_counted(
    on_gpu: PredictedStep, of_gpu: Sequence[Measured], needs_gpu: Check, report: Report
) -> None:
    figures = cost.launches(on_gpu, of_gpu)
    needs_gpu()
    if not figures:
        pytest.skip(
            "torch's profiler saw no kernel: it needs CUPTI, and permission to use it"
        )
    report(*figures, text="by torch's profiler")


def test_constants_of_the_time_model_are_measured(
    constants: list[Figure], needs_gpu: Check, report: Report
) -> None:
    assert all(figure.measured for figure in constants)
    needs_gpu()
    report(*constants, text="one by one")


def test_phases_are_timed(
    on_gpu: PredictedStep,
    of_gpu: Sequence[Measured],
    constants: list[Figure],
    hardware: Hardware,
    needs_gpu: Check,
    report: Report,
) -> None:
    figures = cost.times(on_gpu, of_gpu, hardware, constants)
    assert all(figure.measured is not None for figure in figures)
    needs_gpu()
    report(
        *figures,
        text=f"phases on {hardware.name}, then with the constants measured here",
    )
