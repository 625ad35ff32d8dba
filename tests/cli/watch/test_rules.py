"""Each rule fires on its own sign, and none on a run that is well."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from megatron_muon.lab.watch.history import History
from megatron_muon.lab.watch.rules import warnings
from support import ROOT

ROW, LAYER = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0"


def history(
    change: Callable[[int], dict[str, Any]] = lambda number: {},
    steps: int = 20,
    every: int = 100,
    **begin: Any,
) -> History:
    """A run that is well, but for ``change`` of each record and ``begin`` of its start."""
    records = History()
    rows = {ROW: {"promised_rms": 0.2, "full_rank": 96.0}}
    record = {"kind": "start", "format": 1, "ranks": 4, "muon_share": 0.9, "rows": rows}
    record |= {"newton_schulz_planned": 1.2, **begin}
    records.feed(json.dumps(record).encode() + b"\n")
    for number in range(1, steps + 1):
        record = {
            "kind": "step",
            "step": number * every,
            "muon": {ROW: {"update_rms": 0.17, "moved": 1.0, "cosine": 0.3}},
            "layers": {LAYER: {"output_rms": 1.0 + 0.02 * number}},
            "logits": {f"{LAYER}.self_attention": {"max_logit": 40.0}},
            "newton_schulz_ms": {"mean": 1.0, "max": 1.4, "rank": number % 4},
            **change(number),
        }
        records.feed(json.dumps(record).encode() + b"\n")
    assert not records.faults, records.faults
    return records


def _muon(**numbers: float | None) -> dict[str, Any]:
    return {"muon": {ROW: {"update_rms": 0.17, "moved": 1.0, **numbers}}}


SIGNS: dict[str, tuple[History, str]] = {
    "share": (history(muon_share=0.42), "Muon has 42.0% of the parameters"),
    "small": (history(lambda step: _muon(update_rms=0.05)), f"promised size.* {ROW} 0.25"),
    "large": (history(lambda step: _muon(update_rms=0.3)), f"promised size.* {ROW} 1.50"),
    "nan": (history(lambda step: _muon(cosine=None)), f"not finite .*cosine of {ROW}"),
    "idle": (history(lambda step: _muon(moved=0.75)), f"without a gradient .*{ROW} 25%"),
    "growth": (
        history(lambda step: {"layers": {LAYER: {"output_rms": 1.3**step}}}),
        rf"outputs of layers grow: {LAYER} \d",
    ),
    "logit": (
        history(lambda step: {"logits": {LAYER: {"max_logit": 130.0}}}),
        f"logits above 100: {LAYER} 130",
    ),
    "late": (
        history(lambda step: {"newton_schulz_ms": {"mean": 1.0, "max": 2.0, "rank": 3}}),
        "rank 3 is late: its Newton-Schulz takes 2 ms, the mean rank's 1 ms; planned was 1.20",
    ),
}


@pytest.mark.parametrize("which", SIGNS)
def test_a_sign_gives_its_warning_alone(which: str) -> None:
    import re

    records, text = SIGNS[which]
    (only,) = warnings(records, 100.0)
    assert re.search(text, only.text), only.text


def test_a_run_that_is_well_gives_none() -> None:
    assert warnings(history(), 100.0) == []
    assert warnings(History(), 100.0) == []


def test_one_odd_step_gives_none() -> None:
    def odd(step: int) -> dict[str, Any]:
        times = {"mean": 1.0, "max": 9.0, "rank": step % 4}
        return {"newton_schulz_ms": times} | (_muon(update_rms=0.01) if step == 20 else {})

    assert warnings(history(odd), 100.0) == []


@pytest.mark.parametrize(("steps", "every"), [(7, 1000), (20, 10)])
def test_growth_needs_several_records_and_a_run_past_its_start(steps: int, every: int) -> None:
    records = history(lambda step: {"layers": {LAYER: {"output_rms": 1.3**step}}}, steps, every)
    assert warnings(records, 100.0) == []


def test_every_warning_names_a_heading_of_the_page() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for records, _ in SIGNS.values():
        for each in warnings(records, 100.0):
            assert f"### {each.see}\n" in page


@pytest.mark.parametrize(
    ("own", "given", "fires"),
    [(None, None, True), (30.0, 200.0, False), (150.0, None, False), (150.0, 120.0, True)],
)
def test_the_threshold_is_the_given_one_then_the_runs_then_100(
    own: float | None, given: float | None, fires: bool
) -> None:
    large = {"logits": {LAYER: {"max_logit": 130.0}}}
    records = history(lambda step: large, logit_threshold=own)
    assert bool(warnings(records, given)) == fires
