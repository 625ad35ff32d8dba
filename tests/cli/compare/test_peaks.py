"""The peak of Megatron's whole ``optimizer.step()`` is the plan's, with either optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_muon.lab.bench.ranks import Task, run_ranks
from megatron_muon.lab.compare.command import command_parser
from megatron_muon.lab.compare.compared import Compared
from megatron_muon.lab.compare.figures import Figures, figures
from megatron_muon.lab.compare.jobs import jobs_over
from megatron_muon.lab.compare.predicted import Predicted, TrainingRun, predicted
from megatron_muon.lab.compare.report.page import as_markdown
from megatron_muon.lab.compare.topology import parsed
from megatron_muon.lab.compare.training import Job, train
from megatron_muon.lab.routes.model_flags import megatron_is_quiet
from megatron_muon.orthogonalize.iteration import Device
from megatron_muon.orthogonalize.matmul import multiplies_bf16

# A small vocabulary: so Muon's rounds decide, and not the embedding's AdamW.
WORDS = "--steps 3 --hidden 256 --layers 4 --heads 4 --vocab 256 --seq 32 --global-batch-size 8"
HERE: Device = "cpu_bf16" if multiplies_bf16() else "cpu"
TOPOLOGIES = ["dp4", "tp4", "tp2-dp2", "tp2-pp2-dp2"]
# Models over which the peak is that of elementwise work, of AdamW while the first round travels,
# and of experts' rounds.
OTHERS = [
    ("dp1", []),
    ("tp2-dp2", ["--hidden=128", "--vocab=4096"]),
    ("dp4", ["--hidden=128", "--num-experts=4", "--moe-router-topk=2"]),
]


def jobs(topology: str, *more: str) -> dict[str, Job]:
    given, of_megatron = command_parser().parse_known_args([*WORDS.split(), *more])
    return jobs_over(parsed(topology), given, of_megatron, "test")


def planned(both: dict[str, Job], device: Device = HERE, **settings: Any) -> Predicted:
    muon, adamw = (both[name] for name in ("muon", "adamw"))
    with megatron_is_quiet():
        return predicted(
            TrainingRun(muon.flags, replace(muon.row.config, **settings)),
            TrainingRun(adamw.flags, adamw.row.config),
            device,
        )


def measured(job: Job, world: int) -> int:
    ranks = run_ranks(Task(train, job, world, False, 1, 300, builds=True))
    return figures("any", ranks).peak_bytes


@pytest.mark.parametrize(("topology", "more"), [*((one, []) for one in TOPOLOGIES), *OTHERS])
def test_the_peak_is_within_two_percent_of_the_plan(topology: str, more: list[str]) -> None:
    both = jobs(topology, *more)
    expected, world = planned(both), parsed(topology).world
    assert measured(both["adamw"], world) == pytest.approx(expected.adamw_peak, rel=0.02)
    assert measured(both["muon"], world) == pytest.approx(expected.muon_peak, rel=0.02)


@pytest.mark.parametrize("topology", ["dp4", "tp4", "tp2-dp2"])
def test_the_claim_is_about_the_plan(topology: str) -> None:
    """Muon's peak is not AdamW's, and other rounds would have another one. (Over two stages it is
    the largest matrix that decides.)"""
    both = jobs(topology)
    expected = planned(both)
    assert expected.muon_peak > 1.5 * expected.adamw_peak
    small = planned(both, round_bytes=1 << 18)
    assert small.adamw_peak == expected.adamw_peak
    assert small.muon_peak < 0.95 * expected.muon_peak


def test_a_gpu_has_buffers_and_newton_schulz_alone() -> None:
    """Its fused AdamW has no temporaries, so nothing is planned and there is no ratio."""
    both = jobs("tp2-dp2", "--hidden=128", "--vocab=4096")
    expected = planned(both, "cuda")
    assert expected.adamw_peak == 0 < expected.muon_peak < 0.5 * planned(both).muon_peak
    one = Figures("any", 1.0, 1.0, 1, 0, 0, 8, 512, 0, (1.0,))
    compared = Compared(parsed("tp2-dp2"), one, one, expected)
    assert compared.peak_ratios == {"adamw": None, "muon": 512 / expected.muon_peak}
    run = {"arguments": [], "model": "", "ranks": "", "versions": "", "no_links": "none"}
    text = as_markdown(run | {"planned_for": "cuda"}, [compared])
    assert "planned for GPUs" in text and "| tp2-dp2 | 0.001 | 0.000 |  | 0.001 | " in text
