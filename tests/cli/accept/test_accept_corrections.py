"""The report says what is not as predicted, and which assumption of the time model corrects it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_muon.lab.accept.checks import bits, cost, predicted, speeds
from megatron_muon.lab.accept.checks.model import flags_of, row_of
from megatron_muon.lab.accept.outcome import Figure, Finding, Outcome, as_json, from_json
from megatron_muon.lab.accept.report import as_markdown, corrections, wrong
from megatron_muon.lab.accept.settings import Settings
from megatron_muon.lab.bench.step.measure import Measured
from megatron_muon.lab.bench.step.meter import Counted, Times
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.presets import H100, hardware_of
from support.virtual_gpu.step import virtual_gpu

VIRTUAL = Settings("virtual", 2)


@pytest.fixture(scope="module")
def expected() -> predicted.PredictedStep:
    flags, config = flags_of(VIRTUAL), row_of("muon-contiguous").config
    return predicted.predicted(flags, config, "cuda", on_virtual_gpu=True)


def measured_on(
    expected: predicted.PredictedStep, hardware: Hardware, rank: int = 0, **changes: Any
) -> Measured:
    """What a rank would measure if the time model with this hardware were true."""
    step = expected.price(hardware)
    parts = {
        part: 1e3 * sum(step.phases[phase] for phase in phases) / len(own)
        for _, phases, own, _ in cost._PHASES
        for part in own
    }
    counted = Counted({"gather": expected.sent[rank], "scatter": 0})
    made = Measured(
        times=[Times(sum(parts.values()), parts, 0.0)],
        counted=counted,
        metered_bytes=expected.sent[rank],
        peak_bytes=expected.reports[rank].peak_bytes,
        launched={"kernels": expected.reports[rank].launches - 3, "copies": 3, "memsets": 9},
        host_ms=1e3 * step.host,
    )
    return dataclasses.replace(made, **changes)


def report_of(*parts: Finding) -> str:
    return as_markdown({}, [Outcome("cost", parts)])


def test_measurements_as_predicted_correct_nothing(expected: predicted.PredictedStep) -> None:
    part = cost.times(expected.price, [measured_on(expected, H100)], H100, ())
    assert [figure.name for figure in wrong([Outcome("cost", (part,))])] in (
        [],
        ["step without what AdamW has alike"],
    ), part
    assert "Corrects `" not in report_of(part)


@pytest.mark.parametrize(
    ("constant", "value"),
    [
        ("gemm_efficiency", 0.3),
        ("memory_efficiency", 0.3),
        ("phase_us", 120.0),
    ],
)
def test_a_wrong_phase_names_its_constant_and_the_value_that_it_has(
    constant: str, value: float, expected: predicted.PredictedStep
) -> None:
    true = H100.with_values({constant: value}, "a test")
    part = cost.times(expected.price, [measured_on(expected, true)], H100, ())
    figures = [f for f in wrong([Outcome("cost", (part,))]) if f.constant == constant]
    assert figures and all(f.value == pytest.approx(value, rel=0.05) for f in figures), part
    text = report_of(part)
    assert f"Corrects `{constant}`: set it to {figures[0].value:.4g}" in text
    flag = f"--set {constant}={figures[0].value:.4g}"
    assert flag in text
    hardware_of("h100", [flag.removeprefix("--set ")])  # as megatron-muon plan reads it


def test_a_constant_that_was_measured_explains_the_phase(expected: predicted.PredictedStep) -> None:
    true = H100.with_values({"gemm_efficiency": 0.3}, "a test")
    alone = speeds.share(
        "product", "TFLOP/s", 0.3 * 989.4, 989.4, 0.72, ("gemm_efficiency", "dense_tflops")
    )
    part = cost.times(expected.price, [measured_on(expected, true)], H100, (alone,))
    named = [f.constant for f in wrong([Outcome("cost", (part,))]) if f.constant]
    assert "gemm_efficiency" not in named
    assert alone.value == pytest.approx(0.3) and not alone.as_predicted
    assert corrections(wrong([Outcome("cost", (Finding("c", "ok", figures=(alone,)), part))])) == {
        "gemm_efficiency": 0.3
    }


@pytest.mark.parametrize(
    ("reached", "constant", "value"),
    [(500.0, "gemm_efficiency", 0.5), (1440.0, "dense_tflops", 2000.0)],
)
def test_more_than_the_peak_corrects_the_peak(reached: float, constant: str, value: float) -> None:
    figure = speeds.share(
        "p", "TFLOP/s", reached, 1000.0, 0.72, ("gemm_efficiency", "dense_tflops")
    )
    assert (figure.constant, figure.value) == (constant, value)


def test_a_time_that_no_value_gives_has_no_value() -> None:
    assert predicted.solved(H100, "launch_us", lambda one: one.launch_us + 10, 5.0) is None
    share = "gemm_efficiency"  # at most 1
    assert predicted.solved(H100, share, lambda one: 1 / one.gemm_efficiency, 0.9) is None
    assert predicted.solved(H100, "launch_us", lambda one: one.launch_us, 9.0) == 9.0


def test_bytes_that_are_not_the_plans_fail(expected: predicted.PredictedStep) -> None:
    good = [measured_on(expected, H100, rank) for rank in range(2)]
    assert all(expected.sent)
    assert cost.sent(expected, good).verdict == "ok"
    for change in ({"metered_bytes": 1}, {"counted": Counted({"gather": 1})}):
        bad = cost.sent(expected, [good[0], measured_on(expected, H100, 1, **change)])
        assert bad.verdict == "FAILED" and "bytes that rank 1 sends" in bad.text


def test_memory_and_launches_that_are_not_as_predicted_are_named(
    expected: predicted.PredictedStep,
) -> None:
    good = [measured_on(expected, H100, rank) for rank in range(2)]
    parts = cost.peak(expected, good), cost.launches(expected, good)
    assert "Nothing: all 4 figures" in report_of(*parts)
    twice = 2 * expected.reports[0].peak_bytes
    high = cost.peak(expected, [good[0], measured_on(expected, H100, peak_bytes=twice)])
    assert "- peak memory of rank 1 above its state: predicted" in report_of(high)
    few = measured_on(expected, H100, launched={"kernels": 3})
    assert "virtual_gpu/device/launches.py" in report_of(cost.launches(expected, [few, few]))
    none = measured_on(expected, H100, launched={})
    assert cost.launches(expected, [none, none]).verdict == "not run"


def test_what_a_gpu_alone_runs_makes_no_error_of_its_own_on_the_virtual_one(
    expected: predicted.PredictedStep,
) -> None:
    with virtual_gpu():
        device = torch.device("cuda")
        figures = list(speeds.speeds(H100, device))
        parts = [*bits.elementwise(device), *(bits.twice(device, c) for c in bits._configs())]
    assert [figure.constant for figure in figures] == [
        *("dense_tflops", "memory_gbytes", "launch_us", "kernel_us")
    ] or {figure.constant for figure in figures} >= {"launch_us", "kernel_us"}
    assert all(figure.measured for figure in figures)
    own = cost.with_measured(H100, figures)
    assert own.launch_us == figures[2].value
    assert {part.name for part in parts} >= {
        "momentum, norm and update: foreach",
        "momentum, norm and update: fused kernels",
    }
    ranks = [measured_on(expected, H100)]
    assert cost.times(expected.price, ranks, H100, figures).figures


def test_an_outcome_is_read_as_it_was_written() -> None:
    figure = Figure("a", "ms", 1.0, float("inf"), most=float("inf"), constant="launch_us")
    outcome = Outcome("cost", (Finding("p", "FAILED", "why", (figure,)),), 1.5, "log")
    read = from_json(as_json(outcome))
    (part,) = read.parts
    assert part.figures[0].measured is None and part.figures[0].most == float("inf")
    assert (read.check, read.seconds, read.log) == ("cost", 1.5, "log")
    for wrong_value in (None, [], {"check": 1}, {"check": "a", "parts": [{"verdict": "good"}]}):
        with pytest.raises(ValueError):
            from_json(wrong_value)
