"""``megatron-muon bench step``: what it says of each row is what was run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_muon import MuonConfig
from megatron_muon.lab.bench.step.build import build
from megatron_muon.lab.bench.step.measure import Measured, StepJob, checksums_agree, measure
from megatron_muon.lab.bench.step.meter import StepTimers
from megatron_muon.lab.bench.step.rows import rows
from support.benching import OURS, model_and_ranks
from support.ranks import run

MOE = "--num-experts 4 --moe-ffn-hidden-size 40"


def _measured(arguments: str, names: list[str]) -> dict[str, Any]:
    """On a rank: what each row costs, and the plans that ours has."""
    flags = model_and_ranks(arguments)
    chosen = rows(MuonConfig(), names)
    measured = measure(StepJob(flags, tuple(chosen), 1))
    row = next(row for row in chosen if row.name == "muon-bucketed")
    built = build(row, flags, StepTimers(torch.device("cpu")))
    parts = [part for part in built.optimizer.chained_optimizers if part.muon is not None]
    return {
        "rows": {row.name: one for row, one in zip(chosen, measured, strict=True)},
        "plans": [part.muon.plan for part in parts],
        "rank": parts[0].stage_group.rank(),
    }


@pytest.fixture(
    scope="module",
    params=["--tp 2 --dp 2", "--tp 1 --dp 3 --hidden 96", f"--tp 1 --dp 4 --ep 2 {MOE}"],
)
def by_rank(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    flags = model_and_ranks(request.param)
    return run(_measured, flags.world_size, request.param, ["adamw", *OURS])


def test_our_rows_send_what_is_planned_and_do_each_matrix_once(
    by_rank: list[dict[str, Any]],
) -> None:
    for name in ("muon-contiguous", "muon-bucketed"):
        ranks: list[Measured] = [rank["rows"][name] for rank in by_rank]
        assert sum(one.counted.flops for one in ranks) == sum(one.ns_flops_once for one in ranks)
    for rank in by_rank:
        sent = rank["rows"]["muon-bucketed"].counted.sent_bytes
        planned = sum(plan.sent_bytes()[rank["rank"]] for plan in rank["plans"])
        assert sent.get("gather", 0) + sent.get("scatter", 0) == planned > 0
        once = sum(sum(plan.ns_flops()) for plan in rank["plans"])
        assert rank["rows"]["muon-bucketed"].ns_flops_once == (once if rank["rank"] == 0 else 0)


def test_all_muons_end_a_step_with_the_same_weights(by_rank: list[dict[str, Any]]) -> None:
    by_row = {name: [rank["rows"][name] for rank in by_rank] for name in ("adamw", *OURS)}
    assert checksums_agree([by_row[name] for name in OURS])
    assert not checksums_agree([by_row["adamw"], by_row["muon-bucketed"]])


def test_all_rows_reduce_and_gather_the_same_bytes(by_rank: list[dict[str, Any]]) -> None:
    """But for the padding of buckets, at most 128 elements times the DP size for each."""
    for rank in by_rank:
        costs = [rank["rows"][name].counted.sent_bytes for name in ("adamw", *OURS)]
        assert costs[0] == {k: v for k, v in costs[1].items() if k not in ("gather", "scatter")} | {
            "norm": costs[0]["norm"]  # ours votes, too
        }
        for kind, item in (("grad_reduce", 4), ("param_gather", 2)):
            sent = [cost[kind] for cost in costs]
            assert 0 <= max(sent) - min(sent) <= 20 * 128 * item * len(by_rank)
