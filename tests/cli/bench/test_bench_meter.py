"""The eyes that ``megatron-muon bench step`` sees every row with: bytes, time by part, memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_muon.lab.bench.step.meter import StepTimers, count
from support.ranks import run


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
                torch.empty(sum(received)), torch.ones(sum(sizes[rank])), received, sizes[rank]
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


def test_a_parts_time_is_without_the_parts_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert times.parts_ms == {"muon-gather": 3000, "optimizer-inner-step": 2000, "rest": 5000}
