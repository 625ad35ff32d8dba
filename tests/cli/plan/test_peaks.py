"""Planned memory is what torch's allocator hands out in Megatron's step, with either optimizer."""

from __future__ import annotations

from argparse import Namespace
from functools import cache

import pytest

from megatron_muon.lab.bench.ranks import Task, run_ranks
from megatron_muon.lab.bench.step.flags import command_parser, model_flags
from megatron_muon.lab.bench.step.measure import StepJob, measure
from megatron_muon.lab.bench.step.rows import Row, rows
from megatron_muon.lab.plan.predicted import Predicted, predicted
from megatron_muon.lab.routes.model_flags import megatron_is_quiet
from megatron_muon.orthogonalize.matmul import multiplies_bf16
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.settings.config import MuonConfig

# A small vocabulary: so Muon's rounds decide, and not the embedding's AdamW.
WORDS = "--hidden=256 --layers=4 --heads=4 --vocab=256 --seq=32"
HERE: Device = "cpu_bf16" if multiplies_bf16() else "cpu"
# Models over which the peak is that of elementwise work, of AdamW while the first round travels,
# and of experts' rounds.
OTHERS = [
    ("--tp=1 --dp=1", ""),
    ("--tp=2 --dp=2", "--hidden=128 --vocab=4096"),
    ("--tp=1 --dp=4", "--hidden=128 --num-experts=4 --moe-router-topk=2"),
]
TOPOLOGIES = ["--tp=1 --dp=4", "--tp=4 --dp=1", "--tp=2 --dp=2", "--tp=2 --pp=2 --dp=2"]


@cache
def flags_of(words: str) -> Namespace:
    given, of_megatron = command_parser().parse_known_args([*WORDS.split(), *words.split()])
    return model_flags("a test", given, of_megatron)


def both(**settings: int) -> tuple[Row, ...]:
    (adamw,) = rows(MuonConfig(), ["adamw"], [], "duplicated")
    (muon,) = rows(MuonConfig(**settings), ["muon-contiguous"], [], "duplicated")
    return muon, adamw


def planned(words: str, device: Device = HERE, **settings: int) -> Predicted:
    with megatron_is_quiet():
        return predicted(flags_of(words), *(row.config for row in both(**settings)), device)


@pytest.mark.parametrize(("topology", "more"), [*((one, "") for one in TOPOLOGIES), *OTHERS])
def test_state_and_peak_are_within_two_percent_of_the_plan(topology: str, more: str) -> None:
    expected, flags = planned(f"{topology} {more}"), flags_of(f"{topology} {more}")
    job = StepJob(flags, both(), rounds=1)
    ranks = run_ranks(Task(measure, job, flags.world_size, False, 1, 300, builds=True))
    for number, name in enumerate(("muon", "adamw")):
        for kind in ("state", "peak"):
            most = max(getattr(rows_of_rank[number], f"{kind}_bytes") for rows_of_rank in ranks)
            assert most == pytest.approx(getattr(expected, f"{name}_{kind}"), rel=0.02)


@pytest.mark.parametrize("topology", TOPOLOGIES[:3])
def test_the_claim_is_about_the_plan(topology: str) -> None:
    """Muon's peak is not AdamW's, and other rounds would have another one. (Over two stages it is
    the largest matrix that decides.)"""
    expected, small = planned(topology), planned(topology, round_bytes=1 << 18)
    assert expected.muon_peak > 1.5 * expected.adamw_peak
    assert small.adamw_peak == expected.adamw_peak
    assert small.muon_peak < 0.95 * expected.muon_peak


def test_a_gpu_has_buffers_and_newton_schulz_alone() -> None:
    """Its fused AdamW has no temporaries, so nothing is planned."""
    words = "--tp=2 --dp=2 --hidden=128 --vocab=4096"
    expected = planned(words, "cuda")
    assert expected.adamw_peak == 0 < expected.muon_peak < 0.5 * planned(words).muon_peak
