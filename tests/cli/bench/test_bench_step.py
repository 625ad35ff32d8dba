"""``megatron-muon bench step``: what it says of each row is what was run."""

from __future__ import annotations

import pytest

from megatron_muon.lab.bench.step.measure import Measured, checksums_agree
from support.benching import OURS, measured, model_and_ranks
from support.ranks import run

MOE = "--num-experts 4 --moe-ffn-hidden-size 40"


@pytest.fixture(
    scope="module",
    params=["--tp 2 --dp 2", "--tp 1 --dp 3 --hidden 96", f"--tp 1 --dp 4 --ep 2 {MOE}"],
)
def by_rank(request: pytest.FixtureRequest) -> list[dict[str, Measured]]:
    flags = model_and_ranks(request.param)
    return run(measured, flags.world_size, request.param, ["adamw", *OURS])


def test_all_muons_end_a_step_with_the_same_weights(by_rank: list[dict[str, Measured]]) -> None:
    by_row = {name: [rank[name] for rank in by_rank] for name in ("adamw", *OURS)}
    assert checksums_agree([by_row[name] for name in OURS])
    assert not checksums_agree([by_row["adamw"], by_row["muon-bucketed"]])


def test_all_rows_reduce_and_gather_the_same_bytes(by_rank: list[dict[str, Measured]]) -> None:
    """But for the padding of buckets, at most 128 elements times the DP size for each."""
    for rank in by_rank:
        costs = [rank[name].counted.sent_bytes for name in ("adamw", *OURS)]
        assert costs[0] == {k: v for k, v in costs[1].items() if k not in ("gather", "scatter")} | {
            "norm": costs[0]["norm"]  # ours votes, too
        }
        for kind, item in (("grad_reduce", 4), ("param_gather", 2)):
            sent = [cost[kind] for cost in costs]
            assert 0 <= max(sent) - min(sent) <= 20 * 128 * item * len(by_rank)
