"""Steps with long matrices on one home each, and on several: their predicted times.

``cd tests && python -m figures.scale.shared_steps [WORD ...]``

Prices the stages of ``figures.scale.split_matrices`` and of ``figures.priced_models`` with
``--muon-split-matrices`` off, 2, 4, 8 and auto, on H100s with a library's symmetric kernel. Behind
a time is the busiest rank's Newton-Schulz. The last columns are flops of the busiest rank over the
mean: without shared matrices; with auto, over that mean and over auto's own, in which squares count
at every home. Then come the bytes that all ranks send beside those without shared matrices, all
and between nodes, and between nodes those of the rank that sends most; the ranks of a stage follow
each other from a node's first GPU on.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings

from figures.priced_models import CASES as MODELS
from figures.priced_stages import PricedStage, priced_of
from figures.scale.split_matrices import CASES as LARGE
from megatron_muon.lab.dry_run.stages import planned_on
from megatron_muon.lab.plan.options import command_line
from megatron_muon.lab.pricing.presets import hardware_of
from megatron_muon.lab.pricing.traffic import exchanges_of, traffic_of
from megatron_muon.lab.routes.model_flags import megatron_is_quiet
from megatron_muon.planning.plan import ExchangePlan
from support.virtual_gpu.plans import OVERLAP

ASKED = ("off", "2", "4", "8", "auto")


def _plans(words: list[str]) -> list[ExchangePlan]:
    line = command_line(words)
    run, stage = line.settled(), line.given.stage
    with megatron_is_quiet():
        (planned,) = planned_on(["cuda_symmetric"], run.flags, run.config, run.ranks, stage)
    return [one.plan for one in planned]


def _flops_and_bytes(words: list[str], in_node: int) -> tuple[list[int], int, int, int]:
    """Flops of each rank; bytes that ranks send: all, between nodes, and there the most of one."""
    plans = _plans(words)
    flops = [sum(of_rank) for of_rank in zip(*(plan.ns_flops() for plan in plans), strict=True)]
    traffic = traffic_of(exchanges_of(plans), [rank // in_node for rank in range(plans[0].size)])
    return flops, sum(traffic.sent), sum(traffic.between), max(traffic.between)


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--hardware", default="h100")
    given = parser.parse_args()
    hardware = hardware_of(given.hardware, [])
    heads = " | ".join(ASKED)
    ratios = "busiest / mean, off | auto | auto / its mean | bytes, auto / off"
    print(f"| ms | {heads} | upstream | {ratios} | between nodes | there at most |")
    print("|---" + "|--:" * (len(ASKED) + 7) + "|")
    names = set()
    for case in (*MODELS, *LARGE):
        if case.name in names or (given.words and not any(w in case.name for w in given.words)):
            continue
        names.add(case.name)
        base = f"{case.words} {OVERLAP} --stage {case.stage} --muon-split-matrices".split()
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stages = [priced_of([*base, asked], hardware)[0][0] for asked in ASKED]
            off, *off_bytes = _flops_and_bytes([*base, "off"], hardware.gpus_per_node)
            auto, *auto_bytes = _flops_and_bytes([*base, "auto"], hardware.gpus_per_node)
        mean, own_mean = sum(off) / len(off), sum(auto) / len(auto)
        cells = [case.name, *map(_cell, stages)]
        cells.append(f"{1e3 * min(stages[0].duplicated, stages[0].distributed):.1f}")
        cells += [f"{max(flops) / mean:.2f}" for flops in (off, auto)]
        cells.append(f"{max(auto) / own_mean:.2f}")
        ratios_of_bytes = zip(auto_bytes, off_bytes, strict=True)
        cells += [f"{after / before:.2f}" if before else "–" for after, before in ratios_of_bytes]
        print(f"| {' | '.join(cells)} |", flush=True)


def _cell(stage: PricedStage) -> str:
    step = stage.ours[-1].step
    return f"{1e3 * step.seconds:.1f} ({1e3 * step.newton_schulz_busiest:.1f})"


if __name__ == "__main__":
    main()
