"""A run that logs is bit for bit the run that does not; ``test_numbers`` holds it,
too.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_muon import numbers
from megatron_muon.mcore.host.loop import NO_HOST, Host, set_host
from support.models.gpt import (
    Case,
    Topology,
    printed_by,
    start,
    stepped,
    take_step,
    truth,
)
from support.ranks import error_of, run
from support.runs.topologies import DP2, ONE, PP2, TP2
from support.runs.watching import logged, watched
from support.runs.whole import differences

BF16 = Case()
FP16 = replace(BF16, bf16=False, fp16=True, overflow=((1, "*.linear_fc1.weight"),))
RUNS = [
    (FP16, DP2),
    (
        replace(BF16, layers=4),
        Topology.of("pp2 overlap chunks2 step_overlap"),
    ),
    (replace(BF16, frozen=("embedding.*", "*.layers.0.*")), PP2),
]


@pytest.mark.parametrize("case, topology", RUNS)
def test_logging_changes_no_bit(case: Case, topology: Topology) -> None:
    seen, steps = logged(case, topology)
    assert differences(truth(case), seen) == []
    taken = [not case.overflows(step) for step in range(case.steps)]
    assert [bool(rows) for rows in steps] == taken


def _hooks(case: Case) -> list[Any]:
    built = start(case, TP2)
    before = torch.get_rng_state()
    counts = [_forward_hooks(built.chunks)]
    for step in range(case.steps):
        take_step(built, step)
        counts.append(_forward_hooks(built.chunks))
    return [
        counts,
        built.optimizer.watch is None,
        bool((before == torch.get_rng_state()).all()),
    ]


def _forward_hooks(chunks: list[Any]) -> int:
    return sum(len(m._forward_hooks) for chunk in chunks for m in chunk.modules())


def test_hooks_are_in_the_model_before_a_logging_step_only() -> None:
    case = replace(BF16, steps=6)
    for counts, off, _ in run(_hooks, 2, case):
        assert off and counts == [0] * 7
    for counts, off, same in run(_hooks, 2, watched(case, 3)):
        assert not off and same
        # two layers, the final norm, the logits; the first step's number is not known
        assert counts == [4, 0, 4, 0, 0, 4, 0]


def _kept(case: Case) -> list[Any]:
    """Each step's numbers here, what was written of them, and what was printed."""
    written: list[tuple[int, Any]] = []

    class Kept(Host):
        def write(self, step: int, scalars: Any) -> None:
            written.append((step, scalars))

    set_host(Kept())
    try:
        built, printed = printed_by(lambda: stepped(case, DP2))
    finally:
        set_host(NO_HOST)
    return [built.log["numbers"], written, printed]


def test_all_ranks_have_a_steps_numbers_and_the_last_one_writes_them() -> None:
    """To the loop's writers by name, and their ranges to the log."""
    (numbers, none, silent), (same, written, printed) = run(
        _kept, 2, watched(replace(BF16, steps=5), 2)
    )
    assert numbers == same and [bool(step) for step in numbers] == [0, 1, 0, 1, 0]
    assert written == [(2, numbers[1]), (4, numbers[3])] and none == []
    updates = [v for k, v in numbers[1].items() if k.startswith("muon_update_rms/")]
    line = f"step 2: update_rms {min(updates):.3g} to {max(updates):.3g}, weight_rms "
    assert len(updates) > 4 and f"[megatron_muon] {line}" in printed
    assert "update_rms" not in silent


def _without_numbers() -> list[Any]:
    built = stepped(replace(BF16, steps=1), ONE)
    adamw = start(replace(BF16, optimizer="adam"), ONE)
    return [numbers(built.optimizer), error_of(lambda: numbers(adamw.optimizer))]


def test_a_run_that_does_not_log_has_no_numbers_and_adamw_is_refused() -> None:
    ((none, text),) = run(_without_numbers, 1)
    assert none == {} and text.startswith("TypeError: ") and "is not Muon's" in text


def _full_disk(case: Case) -> str:
    class Full(Host):
        def write(self, step: int, scalars: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    set_host(Full())
    try:
        return printed_by(lambda: stepped(case, ONE))[1]
    finally:
        set_host(NO_HOST)


def test_a_disk_that_is_full_does_not_stop_a_run() -> None:
    (text,) = run(_full_disk, 1, watched(replace(BF16, steps=2)))
    for step in (1, 2):
        assert f"step {step} is not logged: OSError: [Errno 28] No space" in text
