"""Each claim of ``megatron-muon certify`` holds for the step as it is, and fails for a mutant."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_muon.lab.certify.certificate import Certificate, Claim, certify
from megatron_muon.lab.certify.kinds import stage_kinds
from megatron_muon.lab.routes.model_flags import Settled
from megatron_muon.lab.virtual_gpu.megatron import OptimizerSettings
from megatron_muon.mcore import build
from megatron_muon.runtime.optimizer import DistributedMuon
from support.virtual_gpu.mutants import early_free, early_read
from support.virtual_gpu.plans import settled_flags
from support.virtual_gpu.runs import Run

SMALL = (Run(tp=2, dp=2, hidden=256), "--muon-round-mib", "1")  # several rounds: a fc1 has 1 MiB
CLAIMS = [
    "every rank ends its steps",
    "one exchange plan in a stage",
    "no race",
    "no early free",
    "no unmatched send",
    "no rank out of order",
    "no rank waits for ever",
]


def settled_run(run: Run = SMALL[0], *words: str) -> tuple[Namespace, Settled]:
    return settled_flags([*run.words(), *(words or SMALL[1:])])


def certificate(
    run: Run = SMALL[0], *words: str, count: int | None = None, clip_grad: float = 1.0
) -> Certificate:
    flags, settled = settled_run(run, *words)
    kinds = stage_kinds(flags, settled, count)
    return certify(flags, settled, kinds, OptimizerSettings(clip_grad=clip_grad))


def failed(certificate: Certificate) -> list[str]:
    return [claim.name for claim in certificate.claims if claim.faults]


def claim(certificate: Certificate, name: str) -> Claim:
    (named,) = (claim for claim in certificate.claims if claim.name == name)
    return named


@pytest.mark.parametrize(
    "run",
    [
        Run(tp=2, dp=2),
        Run(tp=2, dp=2, overlap=False),
        Run(dp=4, ep=2, experts=4),
        Run(tp=2, dp=4, instances=2),
        Run(tp=1, dp=1),
    ],
    ids=["dense", "no overlap", "experts", "two instances", "one rank"],
)
def test_all_claims_hold_for_the_step_as_it_is(run: Run) -> None:
    verdict = certificate(run)
    assert [claim.name for claim in verdict.claims] == CLAIMS
    assert failed(verdict) == []
    assert verdict.holds
    assert all(kind.is_whole for kind in verdict.kinds)
    assert all(seen == size for seen, size in verdict.compared.values())


# --- mutants: one rank, or all of them, broken on the way -----------------------------------------

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
    original = build.make_plan

    def make_plan(parameters: Any, grid: Any, config: Any, *args: Any) -> Any:
        if dist.get_rank() == ODD:
            config = dataclasses.replace(config, round_bytes=1 << 30)
        return original(parameters, grid, config, *args)

    patch.setattr(build, "make_plan", make_plan)


def lost_message(patch: Patch) -> None:
    """One rank leaves a message of its exchange out."""

    def drop(muon: DistributedMuon) -> None:
        for round in muon.exchange.rounds:
            route = round._gather
            messages = tuple(m for m in route.messages if not m.is_sent)
            round._gather = dataclasses.replace(route, messages=messages)

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


@pytest.mark.parametrize(
    ("mutant", "claims", "said"),
    [
        (raises, CLAIMS[:1], "rank 2: IndexError: list index out of range"),
        (other_plan, ["one exchange plan in a stage", "no unmatched send"], "rank 2 makes another"),
        (early_read, ["no race"], "rank 0: "),
        (early_free, ["no early free"], "rank 0: "),
        (lost_message, ["no unmatched send"], "(1 messages, 3 planned)"),
        (another_reduction, ["no rank out of order"], "{0: 12, 1: 12, 2: 14, 3: 12}"),
        (crossed_groups, ["no rank waits for ever"], "rank 0"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mutant_fails_its_claim(
    mutant: Callable[[Patch], None], claims: list[str], said: str, monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    verdict = certificate()
    assert not verdict.holds
    assert set(claims) <= set(failed(verdict)), failed(verdict)
    assert any(said in fault for fault in claim(verdict, claims[0]).faults), verdict.claims


def test_nothing_is_ok_where_no_rank_ended(monkeypatch: Patch) -> None:
    monkeypatch.setattr(DistributedMuon, "step", lambda *args: [][0])
    verdict = certificate()
    assert failed(verdict) == CLAIMS[:1]
    assert not any(claim.was_made or claim.holds for claim in verdict.claims[1:])


def test_ranks_that_are_compared_with_none_do_not_certify() -> None:
    verdict = certificate(count=1)
    assert failed(verdict) == []
    assert not claim(verdict, "no rank out of order").was_made
    assert not verdict.holds


def test_a_sample_counts_what_all_ranks_count() -> None:
    """A rank's figures do not depend on which others are looked at."""
    whole = {report.rank: report for report in certificate(Run(tp=2, dp=4)).reports[0]}
    sample = certificate(Run(tp=2, dp=4), count=3)
    assert sample.holds
    (reports,) = sample.reports
    assert len(reports) == 3 < len(whole)
    for report in reports:
        assert dataclasses.replace(report, reason="") == dataclasses.replace(
            whole[report.rank], reason=""
        )


def test_stages_alike_are_looked_at_once() -> None:
    run = Run(tp=1, dp=2, layers=8)
    words = [*run.words(), "--pipeline-model-parallel-size", "4", "--world-size", "8"]
    flags, settled = settled_flags(words)
    kinds = stage_kinds(flags, settled, None)
    assert [(kind.name, kind.stages) for kind in kinds] == [
        ("first", (0,)),
        ("middle", (1, 2)),
        ("last", (3,)),
    ]
    verdict = certify(flags, settled, kinds, OptimizerSettings())
    assert verdict.holds
    assert [report.rank for of_kind in verdict.reports for report in of_kind] == [0, 1, 2, 3, 6, 7]


def test_without_clipping_the_norm_is_not_read() -> None:
    waits = {
        clip: sum(wait.count for wait in certificate(clip_grad=clip).reports[0][0].host_waits)
        for clip in (0.0, 1.0)
    }
    assert waits[0.0] <= waits[1.0]
