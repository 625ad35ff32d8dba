"""The time model beside processes: the real exchange over gloo, Newton-Schulz a sleep.

A sleep needs no core, so more ranks than cores work at the same time, as GPUs do: how
long ranks wait for each other is real, and so are the messages. Bytes are few, so they
take no time to speak of, in the processes or in the model.

``cd tests && python -m figures.sleeping_ranks [TP DP ...]`` prints predicted and
measured steps.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_muon.lab.pricing.hardware import TERA, Hardware
from megatron_muon.lab.pricing.presets import H100
from megatron_muon.lab.pricing.step import StepTime, price_step
from megatron_muon.lab.pricing.work import Optimizer
from megatron_muon.orthogonalize.iteration import ns_flops
from megatron_muon.orthogonalize.normalization import Soundness
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.rules import muon as muon_rule
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.kinds import MOST
from support.ranks import run
from support.virtual_gpu.plans import small_plan
from support.virtual_gpu.step import muon_of


@dataclass(frozen=True, slots=True)
class Case:
    """Llama-like layers on ``tp * dp`` ranks."""

    tp: int
    dp: int
    round_kib: int | None = (
        None  # limit of a round; None: the default, which is one round here
    )
    layers: int = 8
    seconds: float = 1.0  # that the mean rank sleeps in a step

    @property
    def config(self) -> MuonConfig:
        return MuonConfig(
            round_bytes=None if self.round_kib is None else self.round_kib << 10
        )

    @property
    def plan(self) -> ExchangePlan:
        return small_plan(
            self.config, self.tp, self.dp, self.layers, hidden=128, ffn=448
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds of a step: as the model has it, and as the processes took."""

    predicted: StepTime
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted.seconds / self.measured - 1


def compared(case: Case) -> Compared:
    """The fastest of some steps: what else runs on the machine only makes steps
    slower.
    """
    plan = case.plan
    idle = Optimizer(plan, (0,) * plan.size)
    predicted = price_step([idle], case.config, sleeping(case, plan), device="cpu")
    steps = run(_steps, plan.size, case)
    return Compared(predicted, min(map(max, zip(*steps, strict=True))))


def sleeping(case: Case, plan: ExchangePlan) -> Hardware:
    """Hardware that takes time for Newton-Schulz only: as much as the sleeps."""
    none = "kernel_us launch_us phase_us message_us peer_us peer_host_us".split()
    free = "memory_gbytes node_gbytes pair_gbytes network_gbytes".split()
    values: dict[str, Any] = dict.fromkeys(none, 0.0) | dict.fromkeys(free, MOST)
    flops_per_second = 1 / _second_per_flop(case, plan)
    values |= {"dense_tflops": flops_per_second / TERA, "gemm_efficiency": 1.0}
    return replace(H100.with_values(values, "the sleeps"), name="sleeping ranks")


def _second_per_flop(case: Case, plan: ExchangePlan) -> float:
    return case.seconds * plan.size / sum(plan.flops)


def _steps(case: Case) -> list[float]:
    """On a rank: seconds of each step, after one that makes the connections."""
    plan, rank = case.plan, dist.get_rank()
    second = _second_per_flop(case, plan)

    def orthogonalize_staged(
        staged: Tensor,
        moves: Tensor,
        numerics: Numerics,
        *,
        soundness: Soundness,
        **shape: int,
    ) -> None:
        flops = ns_flops(shape["rows"], shape["cols"], numerics)
        time.sleep(len(moves) * flops * second)
        for numbers in (soundness.norms, soundness.lines):
            numbers.append(torch.zeros(len(moves)))

    numerics = Numerics(case.config, "cpu")
    cpu = torch.device("cpu")
    muon, groups, states = muon_of(plan, rank, numerics, dist.group.WORLD, cpu)
    times = []
    with mock.patch.object(muon_rule, "orthogonalize_staged", orthogonalize_staged):
        for _ in range(4):
            dist.barrier()
            start = time.perf_counter()
            muon.step(groups, states, lambda: None)
            times.append(time.perf_counter() - start)
    return times[1:]


def said(case: Case, result: Compared) -> str:
    """A line: the case, both times and the error."""
    busiest = result.predicted.newton_schulz_busiest
    limit = "default" if case.round_kib is None else f"{case.round_kib} KiB"
    return (
        f"TP{case.tp} x DP{case.dp}, {case.layers} layers, rounds of {limit}"
        f" ({result.predicted.rounds[0]}): busiest rank sleeps {busiest:.2f} s, "
        "predicted"
        f" {result.predicted.seconds:.2f} s, measured {result.measured:.2f} s,"
        f" error {result.error:+.1%}"
    )


def main() -> None:
    """Compare, with several limits of a round."""
    sizes = [int(word) for word in sys.argv[1:]] or [2, 4, 4, 2, 8, 2]
    for tp, dp in zip(sizes[::2], sizes[1::2], strict=True):
        for round_kib in (None, 512, 128):
            more = {} if tp * dp <= 16 else {"layers": 32, "seconds": 2.0}
            case = Case(tp, dp, round_kib, **more)
            print(said(case, compared(case)), flush=True)


if __name__ == "__main__":
    # workers import the function that they run from a module
    from figures import sleeping_ranks

    sleeping_ranks.main()
