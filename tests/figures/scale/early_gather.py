"""What ``early_param_gather`` saves: the first gather of parameters, started within the step.

``cd tests && python -m figures.scale.early_gather [WORD ...]``

With ``--overlap-param-gather`` Megatron gathers a bucket while the layers before it are at work.
Only the bucket that the forward pass needs first is waited for. A row is that bucket of a stage's
dense optimizer or of its experts', the step after which it starts, and how much of its gather
travels before the stage's step ends: with the links to itself, and in the time that the exchange
leaves of them. The gather is priced by bytes that a rank receives over its slowest link, without
latency.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from figures.priced_models import CASES
from megatron_muon.cli.model_flags import imported_config_class, megatron_is_quiet, settled
from megatron_muon.cli.plan.options import parser
from megatron_muon.cli.plan.run import plan_run
from megatron_muon.dry_run.kinds import optimizer_of
from megatron_muon.dry_run.model import Ranks
from megatron_muon.dry_run.stages import Planned, planned_stage
from megatron_muon.pricing.hardware import GIGA, Hardware
from megatron_muon.pricing.presets import hardware_of
from megatron_muon.pricing.step import StepTime, price_step
from megatron_muon.runtime.optimizer import ADAMW
from support.virtual_gpu.plans import OVERLAP

_PARAMETER = 2  # bytes in bf16


@dataclass(frozen=True, slots=True)
class Early:
    """The first bucket of an optimizer.

    Attributes:
        nbytes: of its parameters.
        round: the last round with one of them, or ``ADAMW``.
        gather: seconds of its gather.
        most, least: seconds of it that pass within the step, with the links to itself and beside
            the exchange.
    """

    nbytes: int
    round: int
    gather: float
    most: float
    least: float


def first_bucket(planned: Planned) -> tuple[int, int]:
    """Bytes of the bucket that the forward pass needs first, and the last round that updates it.

    Megatron fills buckets from a buffer's end.
    """
    bucket = planned.buffers[0].buckets[-1]
    round_of = planned.plan.round_of()
    rounds = [
        round_of[index]
        for index, parameter in enumerate(planned.plan.parameters)
        if parameter.buffer == 0 and parameter.bucket.start == bucket.offset
    ]
    return _PARAMETER * bucket.grad_data.numel(), max(rounds, default=ADAMW)


def gather_seconds(nbytes: int, size: int, inside: int, hardware: Hardware) -> float:
    """An all-gather over ``size`` ranks, ``inside`` ranks apart, by the slowest link it uses."""
    far = size * inside > hardware.gpus_per_node
    per_second = GIGA * (
        hardware.network_gbytes * hardware.network_efficiency
        if far
        else hardware.node_gbytes * hardware.node_efficiency
    )
    return nbytes * (size - 1) / size / per_second


def early_of(planned: Planned, at: int, step: StepTime, ranks: Ranks, hardware: Hardware) -> Early:
    """The first bucket of the optimizer that steps as number ``at``."""
    nbytes, round = first_bucket(planned)
    size = ranks.world // (ranks.tp * ranks.pp)  # with CP
    if planned.experts:
        size = ranks.world // (ranks.expert_tp * ranks.ep * ranks.pp)
    inside = ranks.expert_tp * ranks.ep if planned.experts else ranks.tp
    gather = gather_seconds(nbytes, size, inside, hardware)
    left = max(0.0, step.seconds - step.updated[at][round - ADAMW])
    busy = step.hidden_mean + step.exposed_mean
    return Early(nbytes, round, gather, min(gather, left), min(gather, max(0.0, left - busy)))


def _rows(case: Any, hardware: Hardware) -> Iterator[str]:
    words = f"{case.words} {OVERLAP} --stage {case.stage}".split()
    options = parser(imported_config_class("figures.early_gather"))
    given, again = (options.parse_args(words) for _ in range(2))
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = plan_run(given, hardware, "cuda", ["contiguous"])
        ready = settled(again)
        with megatron_is_quiet():
            planned = planned_stage(again, ready.config, ready.ranks, case.stage)
    step = price_step([optimizer_of(one) for one in planned], ready.config, hardware)
    whole = run.seconds("contiguous") + run.training.seconds(hardware)
    for at, one in enumerate(planned):
        early = early_of(one, at, step, ready.ranks, hardware)
        count = len(one.plan.rounds)
        cells = [f"{case.name}{', experts' if one.experts else ''}", f"{early.nbytes / 1e6:,.0f}"]
        cells += ["AdamW's" if early.round == ADAMW else f"{early.round + 1} of {count}"]
        cells += [f"{1e3 * seconds:,.1f}" for seconds in (early.gather, early.least, early.most)]
        cells += [f"{1e3 * seconds:,.1f}" for seconds in (step.seconds, whole)]
        saved = [100 * seconds / whole for seconds in (early.least, early.most)]
        yield f"| {' | '.join(cells)} | {saved[0]:.2f} – {saved[1]:.2f} % |"


def main() -> None:
    """Print the rows of each model."""
    options = argparse.ArgumentParser()
    options.add_argument("words", nargs="*")
    options.add_argument("--hardware", default="h100")
    asked = options.parse_args()
    hardware = hardware_of(asked.hardware, [])
    print(
        "| | first bucket, MB | updated after round | its gather, ms | within the step, at least ",
        end="",
    )
    print("| at most | step, ms | training step, ms | saved |")
    print("|---" + "|--:" * 8 + "|")
    for case in CASES:
        if not asked.words or any(word in case.name for word in asked.words):
            for row in _rows(case, hardware):
                print(row, flush=True)


if __name__ == "__main__":
    main()
