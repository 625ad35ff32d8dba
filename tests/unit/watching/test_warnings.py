"""Each rule of a run's warnings fires on its own sign, and none on a run that is
well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from megatron_muon.mcore.watching.warnings import _GROW, Warnings
from support import ROOT

ROW, LAYER = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0"


def warned(
    change: Callable[[int], dict[str, Any]] = lambda number: {},
) -> list[str]:
    """All warnings of a run that is well, but for ``change`` of its steps."""
    run = Warnings(None, {ROW: {"promised_rms": 0.2}})
    texts = []
    for number in range(1, 21):
        numbers = {
            **muon(cosine=0.3),
            "output_rms": {LAYER: 1.0 + 0.02 * number},
            "max_logit": {f"{LAYER}.self_attention": 40.0},
            **change(number),
        }
        texts += run.of(100 * number, numbers)
    return texts


def muon(**numbers: float) -> dict[str, Any]:
    of_row = {"update_rms": 0.17, "moved": 1.0, **numbers}
    return {name: {ROW: value} for name, value in of_row.items()}


SIGNS: dict[str, tuple[Callable[[int], Any], str]] = {
    "small": (
        lambda step: muon(update_rms=0.05),
        f"promised size.* {ROW} 0.25",
    ),
    "large": (
        lambda step: muon(update_rms=0.3),
        f"promised size.* {ROW} 1.50",
    ),
    "nan": (
        lambda step: muon(cosine=math.nan),
        f"not finite .*cosine of {ROW}",
    ),
    "idle": (
        lambda step: muon(moved=0.75),
        f"without a gradient .*{ROW} 25%",
    ),
    "growth": (
        lambda step: {"output_rms": {LAYER: 1.3**step}},
        rf"outputs of layers grow: {LAYER} \d",
    ),
    "logit": (
        lambda step: {"max_logit": {LAYER: 130.0}},
        f"logits above 100: {LAYER} 130",
    ),
}


@pytest.mark.parametrize("which", SIGNS)
def test_a_cause_is_warned_of_once(which: str) -> None:
    numbers, text = SIGNS[which]
    (only,) = warned(numbers)
    assert re.search(text, only) and "docs/troubleshooting.md" in only, only


def test_what_the_warning_of_growing_outputs_names_has_the_papers_answer() -> None:
    """Appendix D: decay the norms' gammas."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    (section,) = re.findall(
        rf"^### {_GROW}\n(.*?)^### ", page, re.MULTILINE | re.DOTALL
    )
    assert "--weight-decay-all-params" in section


def test_a_healthy_run_has_no_warning() -> None:
    assert warned() == []


def test_a_warning_is_repeated_if_its_cause_returns() -> None:
    often = warned(lambda step: muon(moved=0.75 if step % 4 == 0 else 1.0))
    assert len(often) == 5


def test_one_bad_step_gives_no_warning() -> None:
    assert warned(lambda step: muon(update_rms=0.05 if step == 9 else 0.17)) == []
