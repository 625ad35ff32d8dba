"""What a new run chooses otherwise than 0.2.0: each difference of the priced models.

Homes and rounds change no bit, strips do. A run that goes on from a checkpoint of
0.2.0 is not told: like another number of ranks, another version may share others.
"""

from __future__ import annotations

import hashlib
import json
from typing import get_args

import pytest

from figures.planned_models import MODELS
from figures.priced_models import CASES
from figures.scale.shared_steps import LARGE
from figures.stages import stage_of, step_of
from megatron_muon.lab.pricing.presets import H100
from megatron_muon.lab.pricing.step import price_step
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.settings.update import Preset
from support.virtual_gpu.plans import OVERLAP, run_of

STAGES = {case.name: case.words for case in (*CASES, *LARGE)}
DEVICES: dict[Preset, Device] = {"safe": "cuda", "fast": "cuda_symmetric"}
# Of 0.2.0, with each preset: a hash of homes and rounds, and milliseconds of the step
# by today's time model.
V020: dict[str, tuple[tuple[str, float], ...]] = {
    "Llama-3-8B TP1 × DP8": (("5aab5b07", 138.33), ("ecea4403", 72.64)),
    "Llama-3-8B TP2 × DP4": (("a195eb2a", 138.90), ("4fd6e776", 72.23)),
    "Llama-3-8B TP8 × DP8": (("2a77b5b3", 24.22), ("9e76ffa6", 15.00)),
    "Llama-3-8B TP8 × DP64": (("7553c8ae", 7.41), ("7553c8ae", 5.39)),
    "Llama-3-70B TP8 PP4 DP16": (("628a615e", 89.33), ("628a615e", 54.18)),
    "Qwen3-30B-A3B EP8, 32 GPUs": (("78bf4dc4", 69.37), ("409bf412", 42.33)),
    "DeepSeek-V3 PP16 EP64, 1,024 GPUs": (("90d76b37", 112.53), ("9590efb8", 66.60)),
    "Llama-3-8B TP1 × DP64": (("fe7409ec", 26.50), ("f48da6f7", 19.53)),
    "Llama-3-8B TP1 × DP512": (("78b9f532", 7.38), ("37f7a4cc", 5.71)),
    "Llama-3-70B TP8 PP4 DP64": (("8defd096", 34.25), ("18a6def3", 21.08)),
    "Llama-3-405B TP8 PP14 DP128": (("02b8a5db", 205.70), ("839c7e40", 103.51)),
}
_BY_TIME = "homes, which count what strips take beside their products"
_BY_ROWS = "other strips, since half of a square travels while the other is multiplied"
# What is other today.
OTHER = {
    ("Llama-3-8B TP8 × DP8", "safe"): "two rounds, one before",
    (
        "Qwen3-30B-A3B EP8, 32 GPUs",
        "safe",
    ): "as many rounds, cut otherwise; other buckets",
    (
        "Qwen3-30B-A3B EP8, 32 GPUs",
        "fast",
    ): "as many rounds, cut otherwise; other buckets",
    ("Llama-3-8B TP1 × DP512", "fast"): "matrices of 1,024 x 4,096 in two strips, too",
    ("Llama-3-8B TP1 × DP512", "safe"): _BY_TIME,
    ("Llama-3-8B TP8 × DP64", "safe"): _BY_TIME,
    ("Llama-3-8B TP8 × DP64", "fast"): _BY_TIME,
    ("Llama-3-70B TP8 PP4 DP16", "safe"): _BY_TIME,
    ("Llama-3-70B TP8 PP4 DP16", "fast"): _BY_TIME,
    ("Llama-3-70B TP8 PP4 DP64", "safe"): _BY_ROWS,
    ("Llama-3-70B TP8 PP4 DP64", "fast"): _BY_ROWS,
    ("Llama-3-405B TP8 PP14 DP128", "safe"): _BY_ROWS,
    ("Llama-3-405B TP8 PP14 DP128", "fast"): _BY_ROWS,
}
WORLDS = {
    f"{model.name} {name} × {size}": f"--model {model.preset} {words} --world-size "
    f"{size} {OVERLAP} --muon-preset fast"
    for model in MODELS
    for size, words, name in model.worlds
    if size <= 1024
}
# Those that docs/plan.md gives --muon-dp-layout bucketed.
BUCKETED = {
    "Qwen3-30B-A3B EP8 × 1024",
    "Moonlight 16B EP8 × 256",
    "Moonlight 16B EP8 × 1024",
}


@pytest.mark.parametrize("preset", get_args(Preset))
@pytest.mark.parametrize("name", V020)
def test_each_other_choice_than_that_of_0_2_0_is_known_and_costs_little(
    name: str, preset: Preset
) -> None:
    device = DEVICES[preset]
    config, optimizers = stage_of(f"{STAGES[name]} --muon-preset {preset}", device)
    plans = [one.plan for one in optimizers]
    choices = [
        [[matrix.home for matrix in plan.matrices], list(map(list, plan.rounds))]
        for plan in plans
    ]
    before, milliseconds = dict(zip(DEVICES, V020[name], strict=True))[preset]
    found = hashlib.sha256(json.dumps(choices).encode()).hexdigest()[:8]
    assert (found != before) == ((name, preset) in OTHER)
    step = price_step(optimizers, config, H100, device=device)
    assert 1e3 * step.seconds <= 1.02 * milliseconds


@pytest.mark.parametrize("name", WORLDS)
def test_bucketed_is_recommended_where_its_step_is_shorter(name: str) -> None:
    words = WORLDS[name]
    assert run_of(words.split()).layout == "contiguous"
    bucketed = step_of(f"{words} --muon-dp-layout bucketed").seconds
    assert (bucketed < 0.95 * step_of(words).seconds) == (name in BUCKETED)
