"""What shared matrices are worth in real models, by the time model."""

from __future__ import annotations

from fractions import Fraction

import pytest

from figures.priced_models import CASES
from figures.priced_stages import priced_of
from megatron_muon.pricing.presets import H100
from support.virtual_gpu.plans import OVERLAP


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
