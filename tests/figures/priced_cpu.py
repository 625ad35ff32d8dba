"""The time model beside ``bench step`` on this machine.

``cd tests && python -m figures.priced_cpu``.

Ranks measure on all of them at once what the model's constants are here: products, memory, messages
and the overhead of an operation. Then they run the step of ``megatron-muon bench step``, row
muon-contiguous, of models that the constants were not fitted to. Predicted and measured are the
parts of the step that the model has: momentum, gather, Newton-Schulz, scatter and update, on the
rank where they take longest, in the median round. AdamW's part, the gradient norm and the gather of
parameters are left out of both: on a CPU AdamW is plain torch, not the fused kernel of the model.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import megatron_muon.cpu.on  # noqa: F401 before what imports Megatron
from megatron_muon.lab.bench.step.measure import StepJob, measure
from megatron_muon.lab.bench.step.rows import rows
from megatron_muon.lab.dry_run.model import ranks_of
from megatron_muon.lab.dry_run.stages import planned_stage
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.presets import H100
from megatron_muon.lab.pricing.step import Optimizer, StepTime, price_step
from megatron_muon.lab.routes.model_flags import megatron_is_quiet
from megatron_muon.orthogonalize.iteration import ns_flops
from megatron_muon.orthogonalize.matmul import plan_device
from megatron_muon.orthogonalize.newton_schulz import orthogonalize
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.runtime import collectives
from megatron_muon.settings.config import MuonConfig
from support.benching import model_and_ranks
from support.ranks import run

CASES = (
    "--tp 1 --dp 2 --hidden 256 --layers 4 --heads 4",
    "--tp 2 --dp 1 --hidden 256 --layers 4 --heads 4",
    "--tp 2 --dp 2 --hidden 256 --layers 4 --heads 4",
    "--tp 1 --dp 2 --hidden 512 --layers 4 --heads 8",
    "--tp 1 --dp 4 --hidden 512 --layers 2 --heads 8",
    "--tp 2 --dp 2 --hidden 512 --layers 2 --heads 8",
    "--tp 1 --dp 2 --hidden 384 --layers 4 --heads 6",
    "--tp 1 --dp 3 --hidden 384 --layers 2 --heads 6",
    "--tp 2 --dp 2 --hidden 384 --layers 3 --heads 6",
    "--tp 4 --dp 1 --hidden 256 --layers 4 --heads 4",
)
ROUNDS = 5
PARTS = ("momentum", "gather", "newton_schulz", "scatter", "update")
SHAPE, TINY = (512, 2048), (8, 8)  # of the matrices that constants are fitted to
ELEMENTS, MESSAGE = 1 << 23, 1 << 22


def main() -> None:
    """Print the constants and the error of each case."""
    config, errors = MuonConfig(), []
    for words in CASES:
        flags = model_and_ranks(words)
        ranks = run(_on_rank, flags.world_size, words, timeout=600)
        hardware = _hardware([constants for constants, _ in ranks])
        predicted = _predicted(flags, config, hardware)
        measured = _median_of_slowest([times for _, times in ranks])
        error = predicted.seconds / measured["all"] - 1
        errors.append(abs(error))
        print(f"{words}: predicted {1e3 * predicted.seconds:.1f} ms,", end=" ")
        print(f"measured {1e3 * measured['all']:.1f} ms, error {error:+.0%};", end=" ")
        print(f"Newton-Schulz predicted {1e3 * predicted.newton_schulz_busiest:.1f} ms,", end=" ")
        print(f"measured {1e3 * measured['newton_schulz']:.1f} ms", flush=True)
        names = ("dense_tflops", "memory_gbytes", "node_gbytes", "message_us", "launch_us")
        print("  " + ", ".join(f"{name} {getattr(hardware, name):.3g}" for name in names))
    print(f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")


def _predicted(flags: Any, config: MuonConfig, hardware: Hardware) -> StepTime:
    with megatron_is_quiet():
        planned = planned_stage(flags, config, ranks_of(flags), 0)
    optimizers = [Optimizer(one.plan, (0,) * one.plan.size) for one in planned]
    return price_step(optimizers, config, hardware, device=plan_device(torch.device("cpu")))


def _on_rank(words: str) -> tuple[dict[str, float], list[dict[str, float]]]:
    """On a rank: its constants, and seconds of each part in each round."""
    flags = model_and_ranks(words)
    constants = _constants()
    job = StepJob(flags, tuple(rows(MuonConfig(), ["muon-contiguous"], [], "duplicated")), ROUNDS)
    (row,) = measure(job)
    return constants, [
        {part: 1e-3 * times.parts_ms.get(f"muon-{part}", 0.0) for part in PARTS}
        for times in row.times
    ]


def _constants() -> dict[str, float]:
    """Of this rank, while the others measure theirs."""
    config, device = MuonConfig(), plan_device(torch.device("cpu"))
    matrix, tiny = (torch.randn(shape).to(torch.bfloat16) for shape in (SHAPE, TINY))
    flat, size = torch.ones(ELEMENTS), dist.get_world_size()
    each = [0 if rank == dist.get_rank() else MESSAGE // (size - 1) for rank in range(size)]
    few = [min(count, 1) for count in each]
    group = dist.group.WORLD
    assert group is not None

    def exchanged(sizes: list[int]) -> None:
        sent = torch.ones(sum(sizes), dtype=torch.bfloat16)
        collectives.start_all_to_all("muon/bench", sent, sizes, sizes, group).wait()

    launches = 3 + 3 * config.ns_steps  # as ``newton_schulz`` of the model counts them on a CPU
    return {
        "dense_tflops": ns_flops(*SHAPE, Numerics(config, device))
        / _seconds(lambda: orthogonalize(matrix, config))
        / 1e12,
        "memory_gbytes": 8 * ELEMENTS / _seconds(lambda: flat.mul_(1.0)) / 1e9,
        "node_gbytes": 2 * sum(each) / _seconds(lambda: exchanged(each)) / 1e9,
        "message_us": 1e6 * _seconds(lambda: exchanged(few)),
        "launch_us": 1e6 * _seconds(lambda: orthogonalize(tiny, config)) / launches,
    }


def _seconds(work: Callable[[], object], rounds: int = 7) -> float:
    """Of the median round, after one that is not counted; all ranks begin together."""
    times = []
    for _ in range(1 + rounds):
        dist.barrier()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _hardware(ranks: list[dict[str, float]]) -> Hardware:
    """The median rank's constants; what a CPU has none of takes no time."""
    values: dict[str, Any] = {
        name: statistics.median(constants[name] for constants in ranks) for name in ranks[0]
    }
    values |= {"gemm_efficiency": 1.0, "memory_efficiency": 1.0, "node_efficiency": 1.0}
    values |= dict.fromkeys(("kernel_us", "peer_us", "peer_host_us"), 0.0)
    values |= {"pair_gbytes": 1e6, "gpus_per_node": 1024, "host_waits": 1}
    values["phase_us"] = values["launch_us"]
    return replace(H100.with_values(values, "measured here"), name="this CPU")


def _median_of_slowest(ranks: list[list[dict[str, float]]]) -> dict[str, float]:
    """In each round the rank where it takes longest, then the median round."""
    rounds = list(zip(*ranks, strict=True))
    whole = [max(sum(parts.values()) for parts in of_round) for of_round in rounds]
    newton = [max(parts["newton_schulz"] for parts in of_round) for of_round in rounds]
    return {"all": statistics.median(whole), "newton_schulz": statistics.median(newton)}


if __name__ == "__main__":
    from figures import priced_cpu  # workers import the function that they run from a module

    CASES_GIVEN = tuple(sys.argv[1:])
    priced_cpu.CASES = CASES_GIVEN or CASES
    priced_cpu.main()
