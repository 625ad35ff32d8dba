"""What ``early_param_gather`` saves: gathers of parameters, started within the step.

``cd tests && python -m figures.scale.early_gather [WORD ...]``

With ``--overlap-param-gather`` Megatron gathers a bucket while the layers before it are at work.
Only the bucket that the forward pass needs first is surely waited for. A row is that bucket of a
stage's dense optimizer or of its experts', the step after which it starts, and how much of its
gather travels before the stage's step ends: with the links to itself, and in the time that the
exchange leaves of them. `buckets early` are those whose gather starts before the last round.
`shared` is the step if gathers took half of all links from the exchange throughout, or all of them
for as long as the early ones take, whichever is less. A gather is priced by bytes that a rank
receives over its slowest link, without latency.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from figures.priced_models import CASES
from megatron_muon.lab.plan.first_gather import FirstGather
from megatron_muon.lab.plan.options import command_line
from megatron_muon.lab.plan.run import plan_run
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.presets import hardware_of
from support.virtual_gpu.plans import OVERLAP


def _rows(case: Any, hardware: Hardware) -> Iterator[str]:
    words = f"{case.words} {OVERLAP} --stage {case.stage}".split()
    line = command_line(words)
    halves = {
        name: getattr(hardware, name) / 2 for name in ("node_efficiency", "network_efficiency")
    }
    halved = hardware.with_values(halves, "half the links")
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run, shared = (plan_run(line, each, "cuda", ["contiguous"]) for each in (hardware, halved))
    step = run.seconds("contiguous")
    slowed = min(shared.seconds("contiguous"), step + _competing(run.kinds[0].first_gathers))
    whole = step + run.training.seconds(hardware)
    for early in run.kinds[0].first_gathers:
        cells = [f"{case.name}{', experts' if early.experts else ''}"]
        cells += [f"{early.nbytes / 1e6:,.0f}", early.after]
        cells += [f"{early.early} of {early.buckets}, {early.early_nbytes / 1e6:,.0f}"]
        times = early.seconds, early.least, early.most, step, slowed, whole
        cells += [f"{1e3 * seconds:,.1f}" for seconds in times]
        saved = [100 * seconds / whole for seconds in (early.least, early.most)]
        yield f"| {' | '.join(cells)} | {saved[0]:.2f} – {saved[1]:.2f} % |"


def _competing(gathers: Sequence[FirstGather]) -> float:
    """Seconds of the gathers that may travel beside the exchange, by what is known of a stage.

    Where experts follow, it is not known how much of the dense ones does.
    """
    if len(gathers) > 1:
        return math.inf
    return sum(one.seconds * one.early_nbytes / one.nbytes for one in gathers)


def main() -> None:
    """Print the rows of each model."""
    options = argparse.ArgumentParser()
    options.add_argument("words", nargs="*")
    options.add_argument("--hardware", default="h100")
    asked = options.parse_args()
    hardware = hardware_of(asked.hardware, [])
    print("| | first bucket, MB | updated by | buckets early, MB | its gather, ms ", end="")
    print("| within the step, at least ", end="")
    print("| at most | step, ms | shared | training step, ms | saved |")
    print("|---" + "|--:" * 10 + "|")
    for case in CASES:
        if not asked.words or any(word in case.name for word in asked.words):
            for row in _rows(case, hardware):
                print(row, flush=True)


if __name__ == "__main__":
    main()
