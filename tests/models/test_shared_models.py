"""Shared matrices in real models, by the time model: their worth and their number."""

from __future__ import annotations

from fractions import Fraction
from typing import get_args

import pytest

from figures.priced_models import CASES, Case
from figures.scale.shared_steps import LARGE
from figures.stages import step_of
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.settings.update import Preset
from support.virtual_gpu.plans import LLAMA_70B

STAGES = {case.name: case for case in (*CASES, *LARGE)} | {
    name: Case(name, f"{LLAMA_70B} --tp 8 --pp 4 --world-size 256", stage)
    for name, stage in (("Llama-3-70B TP8 PP4 DP8", 0), ("its last stage", 3))
}


def seconds(
    name: str, asked: str, device: Device = "cuda_symmetric", preset: Preset = "fast"
) -> float:
    more = f"--muon-split-matrices {asked} --muon-preset {preset}"
    return step_of(f"{STAGES[name].words} {more}", device=device).seconds


@pytest.mark.parametrize(
    "name, at_most",
    [
        ("Llama-3-8B TP8 × DP64", Fraction(1, 3)),
        ("Llama-3-70B TP8 PP4 DP16", Fraction(4, 5)),
    ],
)
def test_auto_shortens_the_predicted_step(name: str, at_most: Fraction) -> None:
    """Of large stages; a stage whose ranks all have work enough is as it was."""
    assert seconds(name, "auto") < at_most * seconds(name, "off")


@pytest.mark.parametrize("device", ["cuda", "cuda_symmetric"])
@pytest.mark.parametrize(
    "name",
    [
        "Llama-3-8B TP1 × DP512",
        "Llama-3-70B TP8 PP4 DP8",
        "its last stage",
        "Llama-3-70B TP8 PP4 DP16",
        "Llama-3-70B TP8 PP4 DP64",
    ],
)
@pytest.mark.parametrize("preset", get_args(Preset))
def test_no_other_number_of_strips_has_a_shorter_predicted_step(
    preset: Preset, name: str, device: Device
) -> None:
    """Neither whole matrices nor 2, 4 or 8 strips of all, with torch's products and a
    kernel's; a hundredth is left to the plan's clock, which is less exact.
    """
    others = (seconds(name, asked, device, preset) for asked in ("off", "2", "4", "8"))
    assert seconds(name, "auto", device, preset) <= 1.01 * min(others)
