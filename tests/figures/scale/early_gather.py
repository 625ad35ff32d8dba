"""What it could save at most to gather a bucket's parameters before the whole step has ended.

``cd tests && python -m figures.scale.early_gather [WORD ...]``

With ``--overlap-param-gather`` Megatron gathers a bucket while the layers before it are at work.
Only the bucket that the forward pass needs first is waited for. If its parameters were all updated
in the first round, its gather could travel during the later rounds. So what is saved is at most
the time of that gather, and at most that of all rounds but one. The gather is priced by bytes that
a rank receives over its link, without latency; links that the exchange uses at the same time are
not counted against it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings

from figures.priced_models import CASES
from megatron_muon.cli.model_flags import imported_config_class, megatron_is_quiet, settled
from megatron_muon.cli.plan.options import parser
from megatron_muon.cli.plan.run import plan_run
from megatron_muon.dry_run.model import Ranks
from megatron_muon.dry_run.stages import Planned, planned_stage
from megatron_muon.pricing.hardware import GIGA, Hardware
from megatron_muon.pricing.presets import hardware_of
from support.virtual_gpu.plans import OVERLAP

_PARAMETER = 2  # bytes in bf16


def first_bucket_bytes(dense: Planned) -> int:
    """Of the parameters that the forward pass needs first: Megatron fills buckets from its end."""
    count: int = dense.buffers[0].buckets[-1].grad_data.numel()
    return _PARAMETER * count


def gather_seconds(nbytes: int, ranks: Ranks, hardware: Hardware) -> float:
    """Of an all-gather over the data-parallel ranks, by the slowest link that it uses."""
    size = ranks.world // (ranks.tp * ranks.pp)  # with CP
    per_second = hardware.node_gbytes * hardware.node_efficiency
    if size * ranks.tp > hardware.gpus_per_node:
        per_second = hardware.network_gbytes * hardware.network_efficiency
    return nbytes * (size - 1) / size / (GIGA * per_second)


def main() -> None:
    """Print a row for each model."""
    options = argparse.ArgumentParser()
    options.add_argument("words", nargs="*")
    options.add_argument("--hardware", default="h100")
    asked = options.parse_args()
    hardware = hardware_of(asked.hardware, [])
    print("| | rounds | first bucket, MB | its gather, ms | saved at most, ms | step, ms ", end="")
    print("| training step, ms | share |")
    print("|---" + "|--:" * 7 + "|")
    for case in CASES:
        if asked.words and not any(word in case.name for word in asked.words):
            continue
        words = f"{case.words} {OVERLAP} --stage {case.stage}".split()
        options_of_plan = parser(imported_config_class("figures.early_gather"))
        given, again = (options_of_plan.parse_args(words) for _ in range(2))
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = plan_run(given, hardware, "cuda", ["contiguous"])
            ready = settled(again)
            with megatron_is_quiet():
                planned = planned_stage(again, ready.config, ready.ranks, case.stage)
        rounds = [len(one.plan.rounds) for one in planned]
        nbytes = first_bucket_bytes(planned[0])
        gather = gather_seconds(nbytes, ready.ranks, hardware)
        step = run.seconds("contiguous")
        saved = min(gather, step * (1 - 1 / sum(rounds)))
        whole = step + run.training.seconds(hardware)
        cells = [case.name, "+".join(map(str, rounds)), f"{nbytes / 1e6:,.0f}"]
        cells += [f"{1e3 * seconds:,.1f}" for seconds in (gather, saved, step, whole)]
        print(f"| {' | '.join(cells)} | {100 * saved / whole:.2f} % |", flush=True)


if __name__ == "__main__":
    main()
