"""Megatron's whole ``optimizer.step()`` with Muon inside, on a GPU that is not
there.
"""

from __future__ import annotations

from functools import cache

import pytest

from megatron_muon import MuonConfig
from support.installed import VERSION
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.runs import Run, record_megatron
from support.virtual_gpu.stage import check_stage

# several rounds: a fc1 has 44 kB
CONFIG = MuonConfig(preset="fast", round_bytes=30_000)
RUNS = {
    "dense, overlap": Run(tp=2, dp=2),
    "dense": Run(tp=2, dp=2, overlap=False),
    "experts, overlap": Run(dp=4, ep=2, experts=4),
    "experts": Run(dp=4, ep=2, experts=4, overlap=False),
    "two instances, overlap": Run(tp=2, dp=4, instances=2),
    "two instances": Run(dp=4, instances=2, overlap=False),
    "experts, two instances, overlap": Run(tp=2, dp=4, ep=2, experts=4, instances=2),
}


@cache
def recorded(run: Run, config: MuonConfig = CONFIG) -> dict[int, Recording]:
    return {
        rank: record_megatron(run, rank, config, steps=2) for rank in range(run.world)
    }


@pytest.mark.parametrize("name", RUNS)
def test_nothing_races_in_two_steps(name: str) -> None:
    """Reductions, both overlaps, vote, clipping, exchange, AdamW and the parameters'
    gather.
    """
    for recording in recorded(RUNS[name]).values():
        assert recording.races == []


@pytest.mark.parametrize("name", RUNS)
def test_all_ranks_communicate_in_the_same_order(name: str) -> None:
    recordings = recorded(RUNS[name])
    assert check_stage(recordings) == []
    assert any(r.launches_by("phase")["muon/adamw"] for r in recordings.values())
    assert all(r.launches_by("phase")["muon/gather"] for r in recordings.values())


def waits(recording: Recording) -> list[str]:
    return [f"{sync.name} in {sync.place.caller}" for sync in recording.host_syncs]


@pytest.mark.parametrize("overlap", [True, False])
def test_muons_step_waits_no_more_than_adamws(overlap: bool) -> None:
    """Nor does it reduce more: whether gradients can be used is in Megatron's own
    norm.
    """
    adamw = record_megatron(Run(overlap=overlap, optimizer="adam"), 0)
    muon = record_megatron(Run(overlap=overlap), 0)
    assert sorted(waits(muon)) == sorted(waits(adamw))
    reduced = [
        [c for c in r.collectives if c.name == "all_reduce"] for r in (adamw, muon)
    ]
    assert len(reduced[0]) == len(reduced[1]) > 0


def test_the_gradients_norm_is_in_the_step() -> None:
    """The host reads it where Megatron asks for a clip; not from 0.19 on."""
    recording = recorded(RUNS["dense"])[0]
    assert recording.launches_by("name")["multi_tensor_l2norm"]
    assert ("item in get_grad_norm_fp32" in waits(recording)) == (VERSION < (0, 19))


def test_all_optimizers_are_stepped() -> None:
    """Experts have an optimizer of their own: both exchange, both step AdamW where they
    have it.
    """
    recording = recorded(RUNS["experts, overlap"])[0]
    dense = recorded(RUNS["dense, overlap"])[0]
    assert recording.launches_by("phase")["muon/newton_schulz"] > 0
    assert {c.group.ranks for c in dense.collectives} == {(0, 1, 2, 3)}
    assert {c.name for c in dense.collectives} <= {
        "send",
        "recv",
        "send+recv",
        "recv+send",
        "all_reduce",
    }
