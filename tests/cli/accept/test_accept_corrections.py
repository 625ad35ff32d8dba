"""The report says what is not as predicted, and which assumption of the time model corrects it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_muon.lab.accept.report import ROWS, STEP, as_markdown, corrections, recommended, wrong
from megatron_muon.lab.accept.results import Check, Figure, Outcome, Verdict
from megatron_muon.lab.bench.step.meter import Counted
from megatron_muon.lab.pricing.presets import H100, hardware_of
from support.gpu import cost, predicted, speeds
from support.gpu.cost import as_predicted_on
from support.gpu.model import flags_of, row_of
from support.gpu.settings import Settings


@pytest.fixture(scope="module")
def expected() -> predicted.PredictedStep:
    flags, config = flags_of(Settings("cuda", 2)), row_of("muon-contiguous").config
    return predicted.predicted(flags, config, "cuda")


def report_of(figures: Sequence[Figure]) -> str:
    return as_markdown({}, [Check("cost", (Outcome("a", "ok", figures=tuple(figures)),))])


def test_measurements_as_predicted_correct_nothing(expected: predicted.PredictedStep) -> None:
    part = cost.times(expected.price, [as_predicted_on(expected, H100)], H100, ())
    assert [figure.name for figure in wrong(part)] in ([], ["step without what AdamW has alike"]), (
        part
    )
    assert "Corrects `" not in report_of(part)


@pytest.mark.parametrize(
    ("constant", "value"), [("gemm_efficiency", 0.3), ("memory_efficiency", 0.3)]
)
def test_a_wrong_phase_names_its_constant_and_the_value_that_it_has(
    constant: str, value: float, expected: predicted.PredictedStep
) -> None:
    true = H100.with_values({constant: value}, "a test")
    part = cost.times(expected.price, [as_predicted_on(expected, true)], H100, ())
    figures = [f for f in wrong(part) if f.constant == constant]
    assert figures and all(f.value == pytest.approx(value, rel=0.05) for f in figures), part
    text = report_of(part)
    assert f"Corrects `{constant}`: set it to {figures[0].value:.4g}" in text
    flag = f"--set {constant}={figures[0].value:.4g}"
    assert flag in text
    hardware_of("h100", [flag.removeprefix("--set ")])  # as megatron-muon plan reads it


@pytest.mark.parametrize(
    ("fast", "bits", "training", "preset"),
    [
        (10.0, "ok", "ok", "fast"),
        (19.9, "ok", "ok", "safe"),
        (10.0, "ok", "FAILED", "safe"),
        (10.0, "ok", "not run", "safe"),
        (10.0, "not run", "ok", "safe"),
    ],
)
def test_fast_is_recommended_where_it_is_faster_and_every_check_for_it_was_run(
    fast: float, bits: Verdict, training: Verdict, preset: str
) -> None:
    times = {"safe": 20.0, "fast": fast}
    figures = tuple(Figure(f"{STEP}{ROWS[name]}", "ms", None, ms) for name, ms in times.items())
    tests = {
        "bits": (Outcome("a", "ok"), Outcome("b", bits)),
        "training": (Outcome("a", training),),
    }
    tests["step"] = (Outcome("a", "ok", figures=figures),)
    said = recommended([Check(*check) for check in tests.items()])
    assert f"`--muon-preset {preset}`" in said
    assert ("both learn" in said) == (bits == training == "ok")


def test_a_constant_that_was_measured_explains_the_phase(expected: predicted.PredictedStep) -> None:
    true = H100.with_values({"gemm_efficiency": 0.3}, "a test")
    alone = speeds.share(
        "product", "TFLOP/s", 0.3 * 989.4, 989.4, 0.72, ("gemm_efficiency", "dense_tflops")
    )
    part = cost.times(expected.price, [as_predicted_on(expected, true)], H100, (alone,))
    named = [f.constant for f in wrong(part) if f.constant]
    assert "gemm_efficiency" not in named
    assert alone.value == pytest.approx(0.3) and not alone.as_predicted
    assert corrections(wrong([alone, *part])) == {"gemm_efficiency": 0.3}


def test_bytes_that_are_not_the_plans_fail(expected: predicted.PredictedStep) -> None:
    good = [as_predicted_on(expected, H100, rank) for rank in range(2)]
    assert all(expected.sent)
    assert wrong(cost.sent(expected, good)) == []
    for change in ({"metered_bytes": 1}, {"counted": Counted({"gather": 1})}):
        bad = cost.sent(expected, [good[0], as_predicted_on(expected, H100, 1, **change)])
        assert {figure.name.split(",")[0] for figure in wrong(bad)} == {"bytes that rank 1 sends"}
