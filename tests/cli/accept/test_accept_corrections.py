"""The report says what is not as predicted, and which assumption of the time model corrects it."""

from __future__ import annotations

import pytest

from megatron_muon.lab.accept.report import ROWS, STEP, recommended
from megatron_muon.lab.accept.results import Check, Figure, Outcome, Verdict


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
