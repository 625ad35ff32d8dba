"""A rank that is stopped, killed or raises in the middle of a step ends all others with
the phase.

gloo only: NCCL has its own watchdog, which ends the process from another thread.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support.models.gpt import Case, Topology, stepped, take_step
from support.ranks import run
from support.runs.topologies import DP4, TP2_DP2, TP2_PP2

CASE = Case(steps=2)
TIMEOUT = 6.0  # of the process groups, in seconds
# For each phase that communicates, the one before it, in which rank 1 fails, and what
# it calls.
PHASES = {
    "muon/gather": ("muon/momentum", "before_gather"),
    "muon/scatter": ("muon/newton_schulz", "_orthogonalize_stack"),
    "muon/share": ("muon/newton_schulz", "_orthogonalize_strips"),
    "muon/turn": ("muon/newton_schulz", "_orthogonalize_strips"),
}
# The first shared matrix is wide: K, or fc2 where QKV is one. TP 2 has fc2 in two
# strips as it is.
SHARED = {
    "muon/share": (("split_matrices", 2), ("split_qkv", False)),
    "muon/turn": (("split_matrices", 4),),
}


@contextmanager
def _short_timeout() -> Iterator[None]:
    """Megatron's groups with a timeout of seconds, as --distributed-timeout-minutes
    sets it.
    """
    from megatron.core import parallel_state as ps

    initialize = ps.initialize_model_parallel

    def with_timeout(*args: Any, **kwargs: Any) -> Any:
        return initialize(*args, **kwargs, distributed_timeout_minutes=TIMEOUT / 60)

    ps.initialize_model_parallel = with_timeout
    try:
        yield
    finally:
        ps.initialize_model_parallel = initialize


def _stop(ended: Path) -> None:
    """Stop this process until the others have ended, or until it is too late for them.

    Then it raises, so that it waits for none of them.
    """
    pid = os.getpid()
    others = dist.get_world_size() - 1
    if os.fork() == 0:  # a stopped process cannot go on by itself
        latest = time.monotonic() + TIMEOUT + 4
        while len(os.listdir(ended)) < others and time.monotonic() < latest:
            time.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)
    raise InterruptedError("rank 1 was stopped")


def _raise() -> None:
    raise ZeroDivisionError("rank 1 has had enough")


def _fail(how: str, ended: Path) -> None:
    """Fail as ``how`` says; ``ended`` gets a file of each rank that has ended."""
    if how == "raise":
        _raise()
    _stop(ended)


def _step_with_a_failing_rank(
    topology: Topology, phase: str, how: str, ended: Path
) -> tuple[str, float]:
    """The error of this rank's second step, and how long after the step's start it
    came.
    """
    shared: Any = SHARED.get(phase, ())
    with _short_timeout():
        built = stepped(replace(CASE, muon=shared), topology, 1)
    if dist.get_rank() == 1:
        megatron = built.part
        for round in megatron.muon.rounds:
            assert hasattr(round.rule, PHASES[phase][1])
            setattr(round.rule, PHASES[phase][1], lambda *args: _fail(how, ended))
    begin = time.monotonic()
    try:
        take_step(built, 1)
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error} {notes}", time.monotonic() - begin
    finally:
        (ended / str(dist.get_rank())).touch()
    return "no error", time.monotonic() - begin


@pytest.mark.parametrize(
    "phase, how, topology",
    [
        ("muon/gather", "raise", TP2_DP2),
        ("muon/gather", "stop", TP2_DP2),
        ("muon/scatter", "raise", TP2_DP2),
        ("muon/scatter", "stop", TP2_DP2),
        # a group of our own
        ("muon/gather", "stop", Topology.of("tp2 dp2 instances2")),
        ("muon/turn", "raise", DP4),
        ("muon/share", "stop", TP2_DP2),
    ],
)
def test_other_ranks_end_within_the_timeout_in_an_error_that_names_the_phase(
    phase: str, how: str, topology: Topology, tmp_path: Path
) -> None:
    results = run(
        _step_with_a_failing_rank, topology.world_size, topology, phase, how, tmp_path
    )
    named = 0
    for rank, (text, seconds) in enumerate(results):
        if rank == 1 and how == "raise":
            assert text.startswith("ZeroDivisionError: rank 1 has had enough")
            assert f"in phase {PHASES[phase][0]} of the optimizer's step" in text
        # not another instance
        elif rank != 1 and rank // 2 < topology.dp // topology.instances:
            # in the phase, or next where it has nothing to share with rank 1 in that
            phases = (phase, "muon/scatter", "params/gather")
            assert text.startswith(
                tuple(f"PhaseError: {name}: rank " for name in phases)
            ), text
            named += text.startswith(f"PhaseError: {phase}: rank ")
            assert "look for the first error among the ranks' logs" in text
            assert seconds < TIMEOUT + 4, f"{seconds:.1f} s"
    assert named, "no rank names the phase in which rank 1 failed"


def _error_on_every_stage(topology: Topology, ended: Path) -> str:
    """The error of this rank, whose own stage may get through the step in which rank 1
    stops.
    """
    with _short_timeout():
        built = stepped(replace(CASE, steps=3), topology, 1)
    if dist.get_rank() == 1:
        for megatron in built.parts:
            for round in megatron.muon.rounds:
                round.rule._orthogonalize_stack = lambda *args: _stop(ended)
    for step in (1, 2):
        try:
            take_step(built, step)
        except Exception as error:
            (ended / str(dist.get_rank())).touch()
            return f"step {step}: {type(error).__name__}: {error}"
    return "no error"


def test_other_stages_end_in_the_norm_of_their_next_step(tmp_path: Path) -> None:
    """In a run they may wait for Megatron's next batch before that, and end there."""
    first, _, *others = run(_error_on_every_stage, 4, TP2_PP2, tmp_path)
    assert first.startswith("step 1: PhaseError: muon/scatter: rank 0"), first
    for text in others:
        assert text.startswith("step 2: PhaseError: grads/norm: rank "), text
