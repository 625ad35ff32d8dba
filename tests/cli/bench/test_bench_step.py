"""``megatron-muon bench``: what it says of rows, ranks, links, times and memory is what
was run.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_muon.lab.bench.step.measure import Measured, checksums_agree
from megatron_muon.lab.bench.step.meter import StepTimers, count
from megatron_muon.lab.bench.step.rows import UPSTREAM
from megatron_muon.lab.bench.step.upstream import why_no_upstream
from support.benching import OURS, measured, model_and_ranks
from support.ranks import run

MOE = "--num-experts 4 --moe-ffn-hidden-size 40"


@pytest.fixture(
    scope="module",
    params=[
        "--tp 2 --dp 2",
        "--tp 1 --dp 3 --hidden 96",
        f"--tp 1 --dp 4 --ep 2 {MOE}",
    ],
)
def by_rank(request: pytest.FixtureRequest) -> list[dict[str, Measured]]:
    flags = model_and_ranks(request.param)
    return run(measured, flags.world_size, request.param, ["adamw", *OURS])


def test_all_muons_end_a_step_with_the_same_weights(
    by_rank: list[dict[str, Measured]],
) -> None:
    by_row = {name: [rank[name] for rank in by_rank] for name in ("adamw", *OURS)}
    assert checksums_agree([by_row[name] for name in OURS])
    assert not checksums_agree([by_row["adamw"], by_row["muon-bucketed"]])


def test_all_rows_reduce_and_gather_the_same_bytes(
    by_rank: list[dict[str, Measured]],
) -> None:
    """But for the padding of buckets, at most 128 elements times the DP size for
    each.
    """
    for rank in by_rank:
        costs = [rank[name].counted.sent_bytes for name in ("adamw", *OURS)]
        assert costs[0] == {
            k: v for k, v in costs[1].items() if k not in ("gather", "scatter")
        } | {
            "norm": costs[0]["norm"]  # ours votes, too
        }
        for kind, item in (("grad_reduce", 4), ("param_gather", 2)):
            sent = [cost[kind] for cost in costs]
            assert 0 <= max(sent) - min(sent) <= 20 * 128 * item * len(by_rank)


def test_each_mode_of_megatrons_own_muon_does_its_work_on_every_tp_rank() -> None:
    """Whole matrices twice at TP 2, or in halves without a message: other
    mathematics.
    """
    if reason := why_no_upstream(model_and_ranks("")):
        pytest.skip(reason)
    names = ["muon-contiguous", *UPSTREAM]
    ranks = run(measured, 4, "--tp 2 --dp 2", names)
    ours, blockwise, duplicated, distributed = (
        sum(rank[name].counted.flops for rank in ranks) for name in names
    )
    assert duplicated == 2 * ours > 0
    assert blockwise < ours < distributed < duplicated
    for rank in ranks:
        kinds = {"param_gather", "grad_reduce", "norm"}
        assert rank["upstream-blockwise"].counted.sent_bytes.keys() == kinds
        for name in UPSTREAM[1:]:
            assert rank[name].counted.sent_bytes.keys() == kinds | {"tp_gather"}
    weights = [{rank[name].weights for rank in ranks} for name in UPSTREAM]
    assert weights[0] != weights[1]


def _counted_collectives() -> dict[str, int]:
    watch = StepTimers(torch.device("cpu"))
    rank = dist.get_rank()
    x = torch.ones(12)
    calls = {
        "gather": lambda: dist.all_gather_into_tensor(torch.empty(36), x),
        "scatter": lambda: dist.reduce_scatter_tensor(torch.empty(4), x),
        "reduction": lambda: dist.all_reduce(x),
        "tp_gather": lambda: dist.broadcast(x, src=1),
    }

    def step() -> None:
        for kind, call in calls.items():
            with watch.part(f"muon-{kind}"):
                call()
        with watch.part("params-all-gather"):
            sizes = [[0, 2, 1], [5, 0, 0], [3, 1, 0]]  # from each rank to each
            received = [row[rank] for row in sizes]
            dist.all_to_all_single(
                torch.empty(sum(received)),
                torch.ones(sum(sizes[rank])),
                received,
                sizes[rank],
            )

    return dict(count(watch, step).sent_bytes)


def test_bytes_are_counted_from_outside_whatever_the_collective() -> None:
    for rank, sent in enumerate(run(_counted_collectives, 3)):
        assert sent.pop("tp_gather", 0) == (2 * 48 if rank == 1 else 0)
        all_to_all = [3, 5, 4][rank] * 4
        assert sent == {
            "gather": 2 * 48,
            "scatter": 2 * 16,
            "norm": 2 * 2 * 16,
            "param_gather": all_to_all,
        }


def test_a_parts_time_is_without_the_parts_inside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([0.0, 1.0, 2.0, 5.0, 6.0, 10.0])  # seconds at each begin and end
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    watch = StepTimers(torch.device("cpu"))

    def step() -> None:
        watch("optimizer-inner-step").start(barrier=True)
        with watch.part("muon-gather"):
            pass
        watch("optimizer-inner-step").stop()

    times = watch.measure(step)
    assert times.ms == 10_000
    assert times.parts_ms == {
        "muon-gather": 3000,
        "optimizer-inner-step": 2000,
        "rest": 5000,
    }
