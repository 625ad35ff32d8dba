"""Finds each optimizer's best rate at three widths, with Megatron's muP (`--use-mup`).

    python mup.py                          # writes figures/mup.json, prints its table
    python mup.py --table                  # prints the table again

It needs megatron-core 0.17 or newer; `bash tests/run.sh` makes a folder with one:

    PYTHONPATH=../../.venv-tests/cores/0.19.0 ../../.venv-tests/bin/python mup.py

The text and the settings are the quickstart's, at a smaller batch. Heads and the MLP
grow with the width. Muon's scale mode is unit_rms_norm, its own factor by width, times
1 as on Megatron's command line. AdamW's parameters have the same --lr. The loss at a
rate is the mean of the same seeds. Where the best rate is the first or last, the next
one is tried, too. Runs that are in the work folder are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training import HERE, NAMES, Study, best, write

SEEDS = (1, 2)
BASE = 64
HEAD = 32  # the size of a head, at every width
WIDTHS = (BASE, 128, 256)
TRAINING = (
    "--train-iters 160 --global-batch-size 8 --micro-batch-size 8 --eval-iters 16"
)


@dataclass(frozen=True)
class Row:
    """An optimizer, its flags and the rates to try at every width."""

    rates: tuple[float, ...]
    flags: str


ROWS = {
    "adam": Row((2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), ""),
    "muon": Row(
        (2e-2, 4e-2, 8e-2, 0.16),
        "--muon-scale-mode unit_rms_norm --muon-matched-adamw-rms 1",
    ),
}


def flags_of(width: int) -> str:
    """Of a model of this width, with the narrowest as muP's base."""
    return (
        f"--use-mup --mup-base-hidden-size {BASE} --hidden-size {width} "
        f"--num-attention-heads {width // HEAD} --ffn-hidden-size {width * 43 // 16}"
    )


def measure(study: Study, optimizer: str, width: int) -> dict[str, Any]:
    """The mean loss at each rate, and the best of them."""
    row = ROWS[optimizer]
    flags = f"{TRAINING} {flags_of(width)} {row.flags}"
    tried = study.searched(optimizer, row.rates, SEEDS, flags)
    return {
        "lr": best(tried),
        "tried": {f"{each:g}": _losses(runs) for each, runs in tried.items()},
    }


def _losses(runs: list[dict[str, Any]]) -> list[float | None]:
    return [run["loss"] for run in runs]


def table(report: dict[str, Any]) -> str:
    """In Markdown."""
    lines = ["| optimizer | width | lr: loss, mean of the seeds | best lr |"]
    lines.append("|---|--:|---|--:|")
    for optimizer, widths in report.items():
        for width, found in widths.items():
            tried = (f"{lr}: {_mean(runs)}" for lr, runs in found["tried"].items())
            cells = NAMES[optimizer], width, ", ".join(tried), f"{found['lr']:g}"
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(losses: list[float | None]) -> str:
    if None in losses:
        return "diverged"
    return f"{statistics.fmean(losses):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=HERE / "out" / "mup")
    parser.add_argument("--figures", type=Path, default=HERE / "figures")
    args, extra = parser.parse_known_args()  # the rest goes to train.py
    path = args.figures / "mup.json"
    if args.table:
        report = json.loads(path.read_text())
    else:
        study = Study(args.work, args.jobs, tuple(extra))
        report = {
            optimizer: {str(each): measure(study, optimizer, each) for each in WIDTHS}
            for optimizer in ROWS
        }
        write(path, report)
    print(table(report))


if __name__ == "__main__":
    main()
