"""Each claim about a run's ranks holds on the virtual GPU, and fails for a step that
breaks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning import plan
from megatron_muon.planning.rounds import table
from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.runtime.exchange import messages
from support.models.model_flags import DEEPSEEK_V3
from support.virtual_gpu.mutants import early_free, early_read
from support.virtual_gpu.plans import (
    LLAMA_8B,
    LLAMA_70B,
    OVERLAP,
    PP,
    QWEN3_30B,
    TP,
    run_of,
)
from support.virtual_gpu.runs import Run
from support.virtual_gpu.verdict import CLAIMS, verdict_of


@pytest.mark.parametrize(
    "words, stages",
    [
        (f"{LLAMA_8B}{OVERLAP}--sequence-parallel {TP} 8 --world-size 512", [1]),
        (f"{LLAMA_70B}{OVERLAP}{TP} 8 {PP} 4 --world-size 512", [1, 2, 1]),
        (f"{QWEN3_30B}{OVERLAP}--expert-model-parallel-size 8 --world-size 64", [1]),
        (" ".join(DEEPSEEK_V3), [1, 14, 1]),
    ],
    ids=[
        "Llama-3-8B TP8 DP64",
        "Llama-3-70B TP8 PP4 DP16",
        "Qwen3-30B-A3B EP8",
        "DeepSeek-V3",
    ],
)
def test_all_claims_hold_for_published_models(words: str, stages: list[int]) -> None:
    """Four ranks of each kind of pipeline stage; the exchange connects before the first
    step.
    """
    found = verdict_of(run_of(words.split()))
    assert found.failed == {}
    assert [len(kind.stages) for kind in found.kinds] == stages
    assert len(found.reports) == 4 * len(stages)
    assert any(1 < seen for seen, _ in found.compared)
    for report in found.reports.values():
        assert report.late_connections == 0
        assert report.host_waits in ((), ("item",))
        assert report.launches > report.muon_launches > 0
    assert any(report.sent for report in found.reports.values())


# --- mutants: one rank, or all of them, broken on the way -----------------------------

Patch = pytest.MonkeyPatch
ODD = 2  # the rank that does otherwise


def _before_step(patch: Patch, action: Callable[[DistributedMuon], object]) -> None:
    original = DistributedMuon.step

    def step(self: DistributedMuon, *args: Any) -> Any:
        if dist.get_rank() == ODD:
            action(self)
        return original(self, *args)

    patch.setattr(DistributedMuon, "step", step)


def raises(patch: Patch) -> None:
    """One rank's step ends with an error."""
    _before_step(patch, lambda muon: [][0])


def other_plan(patch: Patch) -> None:
    """One rank plans larger rounds: fewer of them."""
    original = plan.make_plan

    def make_plan(parameters: Any, grid: Any, numerics: Numerics, *args: Any) -> Any:
        if dist.get_rank() == ODD:
            config = replace(numerics.config, round_bytes=1 << 30)
            numerics = Numerics(config, numerics.device)
        return original(parameters, grid, numerics, *args)

    patch.setattr(plan, "make_plan", make_plan)


def lost_message(patch: Patch) -> None:
    """One rank leaves a message of its exchange out."""

    def drop(muon: DistributedMuon) -> None:
        for round in muon.exchange.rounds:
            route = round._gather
            messages = tuple(m for m in route.messages if not m.is_sent)
            round._gather = replace(route, messages=messages)

    _before_step(patch, drop)


def another_reduction(patch: Patch) -> None:
    """One rank reduces once more over all ranks."""
    _before_step(patch, lambda muon: dist.all_reduce(torch.zeros(1, device="cuda")))


def crossed_groups(patch: Patch) -> None:
    """Some ranks reduce over TP first, others over DP first; each waits for both."""
    original = DistributedMuon.step

    def step(self: DistributedMuon, *args: Any) -> Any:
        tp = parallel_state.get_tensor_model_parallel_group()
        dp = parallel_state.get_data_parallel_group()
        for group in (tp, dp) if dist.get_rank() in (0, 3) else (dp, tp):
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        return original(self, *args)

    patch.setattr(DistributedMuon, "step", step)


def flags_without_room(patch: Patch) -> None:
    """The flags behind one peer's slices put the next peer's message off 16 bytes."""
    patch.setattr(table, "gather_message", lambda elements, slices: elements + slices)
    patch.setattr(messages, "ALIGNED", 1)


@pytest.mark.parametrize(
    "mutant, claims, said",
    [
        (raises, CLAIMS[:1], "rank 2: IndexError: list index out of range"),
        (other_plan, (CLAIMS[1], CLAIMS[4]), "rank 2 makes another"),
        (early_read, CLAIMS[2:3], "rank 0: "),
        (early_free, CLAIMS[3:4], "rank 0: "),
        (lost_message, CLAIMS[4:5], "(1 messages, 2 planned)"),
        (another_reduction, CLAIMS[5:6], "collectives by rank"),
        (crossed_groups, CLAIMS[6:7], "rank 0"),
        (flags_without_room, CLAIMS[7:], "which is no multiple of 16"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mutant_fails_its_claim(
    mutant: Callable[[Patch], None],
    claims: tuple[str, ...],
    said: str,
    monkeypatch: Patch,
) -> None:
    mutant(monkeypatch)
    # several rounds: a fc1 has 1 MiB
    words = [*Run(tp=2, dp=2, hidden=256).words(), "--muon-round-mib", "1"]
    failed = verdict_of(run_of(words)).failed
    assert set(claims) <= failed.keys(), failed
    assert any(said in fault for fault in failed[claims[0]]), failed
