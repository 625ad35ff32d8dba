"""What shared matrices are worth in real models, by the time model."""

from __future__ import annotations

from fractions import Fraction

import pytest

from figures.priced_models import CASES, Case
from figures.priced_stages import priced_of
from figures.scale.split_matrices import CASES as LARGE
from megatron_muon.lab.pricing.presets import H100
from support.virtual_gpu.plans import LLAMA_70B, OVERLAP


@pytest.mark.parametrize(
    ("name", "at_most"),
    [("Llama-3-8B TP8 × DP64", Fraction(1, 3)), ("Llama-3-70B TP8 PP4 DP16", Fraction(4, 5))],
)
def test_auto_shortens_the_predicted_step(name: str, at_most: Fraction) -> None:
    """Of large stages; a stage whose ranks all have work enough is as it was."""
    (case,) = [case for case in CASES if case.name == name]
    words = [*case.words.split(), *OVERLAP.split(), "--stage", str(case.stage)]
    (off,), _ = priced_of([*words, "--muon-split-matrices", "off"], H100)
    (auto,), _ = priced_of(words, H100)  # the default
    assert auto.ours[-1].step.seconds < at_most * off.ours[-1].step.seconds
    assert (auto.duplicated, auto.distributed) == (off.duplicated, off.distributed)


# Of these two speeds alone chose a number of strips that the time model has 6 to 30 % slower.
STAGES = {case.name: case for case in (*CASES, *LARGE)} | {
    name: Case(name, f"{LLAMA_70B} --tp 8 --pp 4 --world-size 256", stage)
    for name, stage in (("Llama-3-70B TP8 PP4 DP8", 0), ("its last stage", 3))
}


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
def test_no_other_number_of_strips_has_a_shorter_predicted_step(name: str) -> None:
    """Neither whole matrices nor 2, 4 or 8 strips of all, with torch's products and a kernel's."""
    case = STAGES[name]
    words = [*case.words.split(), *OVERLAP.split(), "--stage", str(case.stage)]
    seconds = {}
    for asked in ("auto", "off", "2", "4", "8"):
        (stage,), _ = priced_of([*words, "--muon-split-matrices", asked], H100)
        seconds[asked] = [our.step.seconds for our in stage.ours if our.iteration == "auto"]
    auto = seconds.pop("auto")
    assert len(auto) == 2
    for own, *others in zip(auto, *seconds.values(), strict=True):
        assert own <= 1.01 * min(others)
