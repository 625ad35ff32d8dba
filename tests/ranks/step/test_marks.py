"""What a profile of torch's shows of a step, by real ranks: Megatron's parts and
Muon's phases.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import (
    ProfilerActivity,
    profile,
    schedule,
    tensorboard_trace_handler,
)

import megatron_muon
from megatron_muon.lab.trace.events import files_of
from megatron_muon.lab.trace.rank_trace import RankTrace
from support.installed import installed
from support.models.gpt import Case, Topology, on_ranks, start, take_step
from support.ranks import run
from support.runs.topologies import DP3, TP2, TP2_PP2

CASE = Case()
TOPOLOGIES = {"dp3": DP3, "tp2-pp2": TP2_PP2}


def _traced(case: Case, topology: Topology, folder: str) -> int:
    """Trace steps 2 and 3 as watching.md does; bytes of the exchange in a step by our
    own meter.
    """
    built = start(case, topology)
    with (
        installed(),
        profile(
            schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
            on_trace_ready=tensorboard_trace_handler(folder, use_gzip=True),
            record_shapes=True,
        ) as profiler,
    ):
        for number in range(1, 5):
            profiler.step()
            for chunk in built.chunks:
                chunk.finish_grad_sync()
            take_step(built, number - 1)
    if case.optimizer != "muon":
        return 0
    return megatron_muon.meter(built.optimizer).sent_bytes


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
@pytest.mark.parametrize("which", TOPOLOGIES)
def test_a_profile_has_the_marks_of_both_optimizers_and_the_bytes_that_a_rank_sends(
    which: str, optimizer: str, tmp_path: Path
) -> None:
    topology = TOPOLOGIES[which]
    case = replace(CASE, optimizer=optimizer)
    sent = on_ranks(_traced, case, topology, str(tmp_path))
    traces = {trace.rank: trace for trace in map(RankTrace, files_of(tmp_path))}
    assert sorted(traces) == list(range(topology.world_size))
    for rank, trace in traces.items():
        assert trace.marked == 2 and len(trace.optimizer) == 4
        calls = [call for call in trace.calls if call.operation == "send"]
        exchanged = [call.bytes for call in calls if call.place.startswith("muon/")]
        assert sum(exchanged) == 2 * sent[rank]
        names = {call.name for call in trace.calls}
        assert "reduce_scatter fp32 grads/reduce" in names
    assert (sum(sent) > 0) == (optimizer == "muon")


STEPPED = Case(steps=1)
PHASES = "momentum gather adamw newton_schulz scatter update".split()
# What communicates is started in a phase and waited for in another of its name.
# The last update is of what the first left.
STEP = """
    grads/norm/collective
    muon/momentum
    muon/gather muon/gather/collective
    muon/adamw
    muon/gather muon/gather/wait
    muon/newton_schulz
    muon/scatter muon/scatter/collective
    muon/scatter muon/scatter/wait
    muon/update muon/update
""".split()


def _timed(log_level: int) -> dict[str, float]:
    """Seconds by timer that Megatron's ``Timers`` have after a step."""
    from megatron.core.timers import Timers

    built = start(STEPPED, TP2)
    timers = Timers(log_level, "all")
    for megatron in built.parts:
        megatron.config.timers = timers
    take_step(built, 0)
    return {name: timer.elapsed(reset=False) for name, timer in timers._timers.items()}


def test_phases_are_timed_at_log_level_2_alone() -> None:
    for seconds in run(_timed, 2, 2):
        muon = {
            name: value for name, value in seconds.items() if name.startswith("muon-")
        }
        assert list(muon) == [f"muon-{phase}" for phase in PHASES]
        assert all(value > 0 for value in muon.values())
        assert sum(muon.values()) <= seconds["optimizer-inner-step"]
    for seconds in run(_timed, 2, 1):
        assert "optimizer-inner-step" in seconds
        assert not any(name.startswith("muon-") for name in seconds)


def _profiled() -> list[str]:
    built = start(STEPPED, TP2)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        take_step(built, 0)
    events: list[Any] = sorted(trace.events(), key=lambda event: event.time_range.start)
    return [
        event.name for event in events if event.name.startswith(("muon/", "grads/"))
    ]


def test_phases_and_their_collectives_are_in_the_trace_in_order() -> None:
    assert run(_profiled, 2) == [STEP, STEP]
