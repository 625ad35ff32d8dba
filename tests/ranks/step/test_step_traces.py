"""Traces of steps, by real ranks: phases by name, what is written, and what is
refused.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import megatron_muon
from megatron_muon.lab.trace.events import read_trace
from megatron_muon.lab.trace.runs import read_run
from support.models.gpt import Case, Topology, start, take_step
from support.ranks import run

CASE = Case(layers=2)
TOPOLOGIES = {"dp3": Topology(dp=3), "tp2-pp2": Topology(tp=2, pp=2)}


def _traced(topology: Topology, steps: str, folder: str) -> tuple[int, list[bool]]:
    """Bytes of the exchange in a step by our own meter, and whether Megatron is as
    before.
    """
    from megatron.core.distributed.param_and_grad_buffer import (
        _ParamAndGradBucketGroup as group,
    )

    built = start(CASE, topology)
    before = dict(vars(group))
    traces = megatron_muon.step_traces(steps, folder)
    same = []
    for number in range(1, 5):
        with traces.step(number, built.optimizer):
            for chunk in built.chunks:
                chunk.finish_grad_sync()
            take_step(built, number - 1)
        same.append(dict(vars(group)) == before and "step" not in vars(built.optimizer))
    assert not traces.is_open
    return megatron_muon.meter(built.optimizer).sent_bytes, same


@pytest.mark.parametrize("which", TOPOLOGIES)
def test_every_rank_writes_the_chosen_steps_with_the_bytes_that_it_sent(
    which: str, tmp_path: Path
) -> None:
    topology = TOPOLOGIES[which]
    ranks = topology.tp * topology.pp * topology.dp
    results = run(_traced, ranks, topology, "2:3", str(tmp_path))
    assert all(all(same) for _, same in results)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"rank{rank}.json.gz" for rank in range(ranks)
    ]
    run_of = read_run(tmp_path, "x")
    assert set(run_of.ranks.steps) == {2}
    for (at, rank), (sent, _) in zip(run_of.ranks.iterrows(), results, strict=True):
        kinds = run_of.kinds[run_of.kinds["rank"] == at].set_index("name").bytes
        exchanged = [f"send bf16 muon/{phase}" for phase in ("gather", "scatter")]
        assert sent == kinds.reindex(exchanged, fill_value=0).sum()
        assert "reduce_scatter fp32 grads/reduce" in kinds
        assert 0 < rank.optimizer_ms < rank.step_ms
        marks = {e["name"] for e in read_trace(tmp_path / rank.file).events}
        assert {each for each in marks if each.startswith("ProfilerStep#")} == {
            "ProfilerStep#2",
            "ProfilerStep#3",
        }
    assert sum(sent for sent, _ in results) > 0


def _interrupted(folder: str) -> tuple[bool, bool]:
    built = start(CASE, Topology())
    traces = megatron_muon.step_traces("1:2", folder)
    with contextlib.suppress(ZeroDivisionError), traces.step(1, built.optimizer):
        raise ZeroDivisionError
    with traces.step(2, built.optimizer):  # a loop that has caught it
        take_step(built, 0)
    is_on = torch.autograd._profiler_enabled()
    return is_on, "step" in vars(built.optimizer)


def test_an_error_in_a_traced_step_ends_the_profiler_and_writes_nothing(
    tmp_path: Path,
) -> None:
    assert run(_interrupted, 1, str(tmp_path)) == [(False, False)]
    assert list(tmp_path.iterdir()) == []


def _wrapped_by_a_script(folder: str) -> tuple[int, bool]:
    """How often the script's own wrapper was called in two steps, and whether it is
    still there.
    """
    built = start(CASE, Topology())
    calls, method = [], built.optimizer.step

    def counted() -> Any:
        calls.append(0)
        return method()

    built.optimizer.step = counted
    traces = megatron_muon.step_traces("1:2", folder)
    for number in (1, 2):
        with traces.step(number, built.optimizer):
            take_step(built, number - 1)
    return len(calls), vars(built.optimizer)["step"] is counted


def test_a_scripts_own_wrapper_of_step_outlives_a_trace(tmp_path: Path) -> None:
    assert run(_wrapped_by_a_script, 1, str(tmp_path)) == [(2, True)]


def _refused(folder: str) -> list[str]:
    built = start(CASE, Topology())
    said = []

    def attempt(steps: str) -> Any:
        with megatron_muon.step_traces(steps, folder).step(1, built.optimizer):
            take_step(built, 0)

    for steps in ("0:1", "1,2"):
        with pytest.raises(ValueError, match="FIRST:LAST") as caught:
            attempt(steps)
        said.append(str(caught.value))
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(RuntimeError) as other,
    ):
        attempt("1")
    said.append(str(other.value))
    return said


def test_what_cannot_be_traced_is_refused(tmp_path: Path) -> None:
    ((zero, comma, other),) = run(_refused, 1, str(tmp_path))
    assert "got '0:1'" in zero and "got '1,2'" in comma
    assert "another profiler of torch is on" in other


def _restarted(folder: str, first: int) -> str:
    """What a rank prints in a run of ``2:3`` whose first step is ``first``."""
    built = start(CASE, Topology(dp=2))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        traces = megatron_muon.step_traces("2:3", folder)
        for number in range(first, 5):
            with traces.step(number, built.optimizer):
                take_step(built, number - 1)
    return printed.getvalue()


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*.gz")
    }


def _ends_before(folder: str) -> bool:
    traces = megatron_muon.step_traces("3", folder)
    assert not traces.is_open
    with traces.step(2, start(CASE, Topology()).optimizer):
        pass
    return traces.is_open


def test_a_run_that_ends_before_the_steps_says_so(tmp_path: Path) -> None:
    assert run(_ends_before, 1, str(tmp_path)) == [True]


def test_a_restart_before_the_steps_keeps_the_traces_of_earlier_runs(
    tmp_path: Path,
) -> None:
    """All ranks write into one new folder, also where some wrote in an earlier run and
    died.
    """
    (tmp_path / "rank0.json.gz").touch()
    (tmp_path / "run4").mkdir()
    (tmp_path / "run4" / "rank1.json.gz").touch()
    before = _files(tmp_path)
    zero, one = run(_restarted, 2, str(tmp_path), 1)
    after = _files(tmp_path)
    new = {"run5/rank0.json.gz", "run5/rank1.json.gz"}
    assert set(after) == {*before, *new} and after.items() >= before.items()
    assert (
        f"an earlier run's traces stay as they are: this run's are in {tmp_path}/run5"
        in zero
    )
    assert one == ""
    assert set(read_run(tmp_path / "run5", "x").ranks.steps) == {2}


def test_a_restart_within_the_steps_traces_the_rest(tmp_path: Path) -> None:
    assert run(_restarted, 2, str(tmp_path), 3) == ["", ""]
    assert read_trace(tmp_path / "rank1.json.gz").metadata["megatron_muon"][
        "steps"
    ] == [3, 3]


def test_a_restart_past_the_steps_says_so_and_traces_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank0.json.gz").touch()
    before = _files(tmp_path)
    zero, one = run(_restarted, 2, str(tmp_path), 4)
    assert "no step is traced: the last of them is 3, and this run starts at 4" in zero
    assert zero.count("\n") == 1 and one == ""
    assert _files(tmp_path) == before


STEPPED = Case(layers=2, steps=1)
PHASES = ["momentum", "gather", "adamw", "newton_schulz", "scatter", "update"]
# What communicates is started in a phase and waited for in another of its name.
STEP = [
    "grads/norm/collective",
    "muon/momentum",
    "muon/gather",
    "muon/gather/collective",
    "muon/adamw",
    "muon/gather",
    "muon/gather/wait",
    "muon/newton_schulz",
    "muon/scatter",
    "muon/scatter/collective",
    "muon/scatter",
    "muon/scatter/wait",
    "muon/update",
    "muon/update",  # and what it left
]


def _timed(log_level: int) -> dict[str, float]:
    """Seconds by timer that Megatron's ``Timers`` have after a step."""
    from megatron.core.timers import Timers

    built = start(STEPPED, Topology(tp=2))
    timers = Timers(log_level, "all")
    for megatron in built.optimizer.chained_optimizers:
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
    built = start(STEPPED, Topology(tp=2))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        take_step(built, 0)
    events: list[Any] = sorted(trace.events(), key=lambda event: event.time_range.start)
    return [
        event.name for event in events if event.name.startswith(("muon/", "grads/"))
    ]


def test_phases_and_their_collectives_are_in_the_trace_in_order() -> None:
    assert run(_profiled, 2) == [STEP, STEP]
