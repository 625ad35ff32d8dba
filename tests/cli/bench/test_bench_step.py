"""``megatron-muon bench step``: what it says of each row is what was run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_muon import MuonConfig
from megatron_muon.lab.bench.step.build import build
from megatron_muon.lab.bench.step.measure import Measured, StepJob, checksums_agree, measure
from megatron_muon.lab.bench.step.meter import StepTimers
from megatron_muon.lab.bench.step.rows import rows
from support.benching import OURS, model_and_ranks
from support.installed import VERSION
from support.ranks import run

PAPER = ("dp_gather", "tp_gather")
MOE = "--num-experts 4 --moe-ffn-hidden-size 40"


def _measured(arguments: str, names: list[str]) -> dict[str, Any]:
    """On a rank: what each row costs, and the plans that ours has."""
    flags = model_and_ranks(arguments)
    chosen = rows(MuonConfig(), names, [], "duplicated")
    measured = measure(StepJob(flags, tuple(chosen), 1))
    row = next(row for row in chosen if row.name == "muon-paper")
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


def _by_formula(plan: Any, rank: int) -> dict[str, int]:
    """Bytes and flops of the paper's algorithm by the formulas of ``step.paper``, from who owns
    each element and which matrix each row is of."""
    (place,) = [place for *place, other in plan.grid.places() if other == rank]
    ep, tp, dp = place
    tp_size, dp_size = plan.grid.tp_size, plan.grid.dp_size
    total: dict[str, int] = defaultdict(int)
    for parameter in plan.parameters:
        if parameter.ep_rank != ep:
            continue
        height, width = parameter.shape
        owner = torch.full((height * width,), -1)
        for other, piece in parameter.shards(dp_size):
            owner[piece.start : piece.stop] = other
        matrix = torch.full((height, 1), -1)
        for block in parameter.blocks[tp]:
            matrix[block.rows.start : block.rows.stop] = block.matrix
        matrix = matrix.expand(height, width).reshape(-1)
        split = 1 if parameter.partition_dim is None else tp_size
        for index, shape in enumerate(parameter.matrices):
            owners = owner[matrix == index]
            mine, sharers = int((owners == dp).sum()), len(owners.unique())
            if not mine:
                continue
            m, n = sorted((shape.rows, shape.cols))
            total["dp_gather"] += 2 * mine * (sharers - 1)
            total["tp_gather"] += 2 * m * n // split * (split - 1)
            total["flops"] += 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
    return total


def test_the_papers_row_sends_and_computes_what_its_formulas_say(
    by_rank: list[dict[str, Any]],
) -> None:
    for rank in by_rank:
        paper: Measured = rank["rows"]["muon-paper"]
        wanted: dict[str, int] = defaultdict(int)
        for plan in rank["plans"]:
            for kind, number in _by_formula(plan, rank["rank"]).items():
                wanted[kind] += number
        sent = paper.counted.sent_bytes
        assert {kind: sent.get(kind, 0) for kind in PAPER} == {k: wanted[k] for k in PAPER}
        assert paper.counted.flops == wanted["flops"] > 0
    kinds = {kind for rank in by_rank for kind in rank["rows"]["muon-paper"].counted.sent_bytes}
    assert "dp_gather" in kinds and kinds.isdisjoint({"gather", "scatter"})


def test_our_rows_send_what_is_planned_and_do_each_matrix_once(
    by_rank: list[dict[str, Any]],
) -> None:
    for name in ("muon-contiguous", "muon-bucketed"):
        ranks: list[Measured] = [rank["rows"][name] for rank in by_rank]
        assert sum(one.counted.flops for one in ranks) == sum(one.ns_flops_once for one in ranks)
    for rank in by_rank:  # the paper's row and ours in the same buckets have the same plan
        sent = rank["rows"]["muon-bucketed"].counted.sent_bytes
        planned = sum(plan.sent_bytes()[rank["rank"]] for plan in rank["plans"])
        assert sent.get("gather", 0) + sent.get("scatter", 0) == planned > 0
        once = sum(sum(plan.ns_flops()) for plan in rank["plans"])
        assert rank["rows"]["muon-bucketed"].ns_flops_once == (once if rank["rank"] == 0 else 0)


def test_all_muons_end_a_step_with_the_same_weights(by_rank: list[dict[str, Any]]) -> None:
    """The paper's algorithm is another way to the same result; AdamW's is another."""
    by_row = {name: [rank["rows"][name] for rank in by_rank] for name in ("adamw", *OURS)}
    assert checksums_agree([by_row[name] for name in OURS])
    assert not checksums_agree([by_row["adamw"], by_row["muon-paper"]])


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


def test_state_is_what_adamw_keeps_and_less(by_rank: list[dict[str, Any]]) -> None:
    totals = {
        name: sum(rank["rows"][name].state_bytes for rank in by_rank) for name in ("adamw", *OURS)
    }
    elements = sum(m.numel for plan in by_rank[0]["plans"] for m in plan.matrices)
    assert {totals["adamw"] - totals[name] for name in OURS} == {4 * elements}


def _planned_bytes(aligned: bool) -> list[int]:
    """On a rank: what all ranks together send in muon-contiguous, by the plan of each part."""
    flags = model_and_ranks("--tp 1 --dp 3 --hidden 96")
    (row, *_) = rows(MuonConfig(homes="local"), ["muon-contiguous"], [], "duplicated")
    row = replace(row, config=replace(row.config, align_shards=aligned and row.config.align_shards))
    measure(StepJob(flags, (), 0))  # Megatron's groups
    built = build(row, flags, StepTimers(torch.device("cpu")))
    return [sum(part.muon.plan.sent_bytes()) for part in built.optimizer.chained_optimizers]


@pytest.mark.skipif(VERSION < (0, 18), reason="Megatron takes no layout before core 0.18")
def test_the_contiguous_row_is_in_the_order_in_which_shards_cut_little() -> None:
    ordered, stock = (run(_planned_bytes, 3, aligned)[0] for aligned in (True, False))
    assert sum(ordered) < sum(stock)
