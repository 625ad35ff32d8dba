"""The phases of a step are in Megatron's timers and in profiler traces, by the same names."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from support.models.gpt import Case, Topology, start, take_step
from support.ranks import run

CASE = Case(layers=2, steps=1)
PHASES = ["momentum", "gather", "adamw", "newton_schulz", "scatter", "update"]
# What communicates is started in a phase and waited for in another of its name.
STEP = [
    *("grads/norm/collective", "muon/momentum"),
    *("muon/gather", "muon/gather/collective", "muon/adamw", "muon/gather", "muon/gather/wait"),
    *("muon/newton_schulz", "muon/scatter", "muon/scatter/collective"),
    *("muon/scatter", "muon/scatter/wait", "muon/update", "muon/update"),  # and what it left
]


def _timed(log_level: int) -> dict[str, float]:
    """Seconds by timer that Megatron's ``Timers`` have after a step."""
    from megatron.core.timers import Timers

    built = start(CASE, Topology(tp=2))
    timers = Timers(log_level, "all")
    for megatron in built.optimizer.chained_optimizers:
        megatron.config.timers = timers
    take_step(built, 0)
    return {name: timer.elapsed(reset=False) for name, timer in timers._timers.items()}


def test_phases_are_timed_at_log_level_2_alone() -> None:
    for seconds in run(_timed, 2, 2):
        muon = {name: value for name, value in seconds.items() if name.startswith("muon-")}
        assert list(muon) == [f"muon-{phase}" for phase in PHASES]
        assert all(value > 0 for value in muon.values())
        assert sum(muon.values()) <= seconds["optimizer-inner-step"]
    for seconds in run(_timed, 2, 1):
        assert "optimizer-inner-step" in seconds
        assert not any(name.startswith("muon-") for name in seconds)


def _traced() -> list[str]:
    built = start(CASE, Topology(tp=2))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        take_step(built, 0)
    events: list[Any] = sorted(trace.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith(("muon/", "grads/"))]


def test_phases_and_their_collectives_are_in_the_trace_in_order() -> None:
    assert run(_traced, 2) == [STEP, STEP]
