"""The layout that docs/plan.md gives each priced model."""

from __future__ import annotations

import pytest

from figures.planned_models import WORLDS
from figures.stages import step_of
from support.virtual_gpu.plans import run_of

FAST = {
    f"{world.name} × {world.size}": f"{world.flags} --muon-preset fast"
    for world in WORLDS
    if world.size <= 1024
}
# Those that docs/plan.md gives --muon-dp-layout bucketed.
BUCKETED = {
    "Qwen3-30B-A3B EP8 × 1024",
    "Moonlight 16B EP8 × 256",
    "Moonlight 16B EP8 × 1024",
}


@pytest.mark.parametrize("name", FAST)
def test_bucketed_is_recommended_where_its_step_is_shorter(name: str) -> None:
    words = FAST[name]
    assert run_of(words.split()).layout == "contiguous"
    bucketed = step_of(f"{words} --muon-dp-layout bucketed").seconds
    assert (bucketed < 0.95 * step_of(words).seconds) == (name in BUCKETED)
