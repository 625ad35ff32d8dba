"""``grad_norm_skip_threshold``: all ranks skip a step by its norm, or none does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from support.installed import VERSION
from support.models.gpt import (
    Case,
    Topology,
    are_unchanged,
    held,
    prepare_step,
    start,
    take_step,
)
from support.ranks import run
from support.runs.topologies import DP2, DP2_EP2, TP2, TP2_DP2
from support.runs.whole import differences, whole

pytestmark = pytest.mark.skipif(
    VERSION < (0, 19), reason="Megatron has it since core 0.19"
)
CASE = Case(layers=1)
# Rank 0 of two holds a part of fc1 alone, which is Muon's and not clipped, so that
# Megatron would not skip a step on it.
ONE_HAS_NONE = replace(
    CASE.with_muon(clip_scope="adamw"),
    clip=1.0,
    frozen=("*norm*", "*attention*", "*linear_fc2*", "output_layer*", "*bias"),
)
CASES = {
    "tp and dp": (CASE, TP2_DP2),
    "experts": (replace(CASE, moe=True), DP2_EP2),
    "one has none": (ONE_HAS_NONE, DP2),
    "instances": (CASE, Topology.of("dp4 overlap instances2")),
    "fp16": (replace(CASE, bf16=False, fp16=True), TP2),
}


def _steps(case: Case, topology: Topology, skipped: int | None) -> dict[str, Any]:
    """Of steps 0, 1 and 2 one is skipped, by a threshold below its norm."""
    built = start(case, topology)
    config = built.optimizer.config
    for step in range(3):
        if step != skipped:
            config.grad_norm_skip_threshold = 1e9
            take_step(built, step)
            continue
        before = held(built)["shards"]
        prepare_step(built, step)
        config.grad_norm_skip_threshold = 1e-9
        is_successful, norm, _ = built.optimizer.step()
        assert is_successful is False
        assert math.isfinite(float(norm)) and float(norm) > 1e-9
        assert are_unchanged(built, before)
        built.optimizer.zero_grad()
    return held(built)


def _without(case: Case, topology: Topology, step: int) -> dict[str, Any]:
    built = start(case, topology)
    for number in range(3):
        if number != step:
            take_step(built, number)
    return held(built)


@pytest.mark.parametrize("name", CASES)
def test_a_step_above_it_moves_nothing_on_any_rank(name: str) -> None:
    case, topology = CASES[name]
    world = topology.world_size
    skipping = run(_steps, world, case, topology, 1, timeout=60.0)
    without = run(_without, world, case, topology, 1)
    assert differences(whole(without), whole(skipping)) == []
