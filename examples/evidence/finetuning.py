"""Fine-tunes a pretrained GPT with the optimizer that pretrained it, and with the other
one.

    python finetuning.py          # writes figures/finetuning.json and .png, prints the tables
    python finetuning.py --table  # draws and prints again

A GPT is pretrained on the standard library's Python with AdamW and with Muon, each as
tuned by convergence.py. Each of the two is then fine-tuned on the C headers with AdamW
and with Muon at a matched RMS of 0.2 and 0.5, whose states start at zero: several rates
each, the best one with three seeds. The loss on held-out headers says what was learnt,
the loss on held-out Python what was forgotten. Runs that are in the work folder are not
repeated.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from convergence import tuned_flags
from reports import COLORS  # which needs no display
from training import HERE, NAMES, QUICKSTART, Study, best, write

SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Tuner:
    """An optimizer of fine-tuning, its flags beside the tuned ones, and its rates.

    ``line`` has the marker and the dashes of its curve.
    """

    label: str
    line: str
    optimizer: str
    flags: str
    rates: tuple[float, ...]


# All have a low rate, and AdamW's best one, 4e-3.
TUNERS = {
    "adam": Tuner("AdamW", "o--", "adam", "", (1e-3, 2e-3, 4e-3, 8e-3)),
    "muon_0.2": Tuner(
        "Muon, 0.2",
        "s-",
        "muon",
        "--muon-matched-adamw-rms 0.2",
        (1e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    ),
    "muon_0.5": Tuner(
        "Muon, 0.5",
        "^:",
        "muon",
        "--muon-matched-adamw-rms 0.5",
        (1e-3, 4e-3, 8e-3, 1.6e-2),
    ),
}
STEPS = 60
TUNING = (
    f"--text headers --evaluate-other-text --finetune --train-iters {STEPS} "
    "--eval-interval 10 --eval-iters 8 --lr-warmup-iters 5"
)


def pretrained(study: Study, optimizer: str, tuned: dict[str, Any]) -> Path:
    """The folder of the pretrained checkpoint; pretrains if it is not there."""
    folder = study.work / f"pretrained_{optimizer}"
    if not (folder / "done").exists():
        command = [
            sys.executable,
            str(QUICKSTART / "train.py"),
            f"@{QUICKSTART / 'gpt.args'}",
        ]
        command += [
            "--optimizer",
            optimizer,
            "--lr",
            str(tuned[optimizer]["found"]["--lr"]),
        ]
        command += ["--seed", "1", "--micro-batch-size", "32", "--save", str(folder)]
        command += [*tuned_flags(tuned, optimizer).split(), *study.extra]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (study.work / f"pretrained_{optimizer}.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
        (folder / "done").touch()
        print(f"pretrained with {NAMES[optimizer]}", flush=True)
    return folder


def measure(study: Study, tuned: dict[str, Any]) -> dict[str, Any]:
    """Every pair of optimizers at its best rate."""
    report: dict[str, Any] = {"seeds": SEEDS, "steps": STEPS, "pairs": {}}
    for before in NAMES:
        folder = pretrained(study, before, tuned)
        for name, tuner in TUNERS.items():
            optimizer = tuner.optimizer
            flags = f"{tuned_flags(tuned, optimizer)} {tuner.flags} {TUNING}"
            flags += f" --load {folder}"
            tried = study.losses(optimizer, tuner.rates, SEEDS[:1], flags)
            rate = best(tried)
            runs = study.losses(optimizer, (rate,), SEEDS, flags)[rate]
            report["pairs"][f"{before} {name}"] = {
                "lr": rate,
                "at_edge": rate in (tuner.rates[0], tuner.rates[-1]),
                "tried": {f"{one:g}": seeds[0]["loss"] for one, seeds in tried.items()},
                "runs": runs,
            }
    return report


def table(report: dict[str, Any]) -> str:
    """In Markdown; a rate at the edge of its grid has a star."""
    lines = [
        "| pretrained with | tuned with | lr | headers, before | headers, after | "
        "Python, before | Python, after |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for pair, found in report["pairs"].items():
        start, tuner = pair.split()
        before = NAMES[start]
        after = TUNERS[tuner].label
        cells = [f"{found['lr']:g}{'*' * found['at_edge']}"]
        for kind in ("validation", "other"):
            curves = [run[kind] for run in found["runs"]]
            cells.append(f"{statistics.fmean(curve[0][1] for curve in curves):.3f}")
            ends = [curve[-1][1] for curve in curves]
            cells.append(
                f"{statistics.fmean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})"
            )
        lines.append(f"| {before} | {after} | {' | '.join(cells)} |")
    return "\n".join(lines)


def losses(report: dict[str, Any], start: str, tuner: str) -> dict[float, float]:
    """The first seed's loss on held-out headers at each rate; none if not run."""
    tried = report["pairs"].get(f"{start} {tuner}", {"tried": {}})["tried"]
    return {float(rate): loss for rate, loss in tried.items() if loss is not None}


def rates_table(report: dict[str, Any], start: str) -> str:
    """In Markdown: the loss of every optimizer at every rate after one pretraining."""
    columns = [losses(report, start, name) for name in TUNERS]
    head = [f"lr, pretrained with {NAMES[start]}"]
    head += [tuner.label for tuner in TUNERS.values()]
    lines = [f"| {' | '.join(head)} |", f"|--:|{'--:|' * len(columns)}"]
    for rate in sorted({rate for column in columns for rate in column}):
        cells = [f"{column[rate]:.3f}" if rate in column else "" for column in columns]
        lines.append(f"| {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    """A panel for each pretraining: the loss over the rate."""
    figure, grid = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, start in zip(grid, NAMES, strict=True):
        for name, tuner in TUNERS.items():
            if found := losses(report, start, name):
                color = COLORS[tuner.optimizer]
                axes.plot(*zip(*found.items(), strict=True), tuner.line, color=color)
                axes.lines[-1].set_label(tuner.label)
        axes.set_title(f"pretrained with {NAMES[start]}", fontsize="medium")
        axes.set_xscale("log")
        axes.grid(alpha=0.25)
    grid[0].set_ylabel("loss on C headers, nats per byte")
    grid[0].legend(frameon=False)
    figure.supxlabel("learning rate of 60 steps of fine-tuning")
    figure.savefig(path, dpi=72)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=HERE / "out" / "finetuning")
    parser.add_argument("--figures", type=Path, default=HERE / "figures")
    args, extra = parser.parse_known_args()  # the rest goes to train.py
    path = args.figures / "finetuning.json"
    if not args.table:
        tuned = json.loads((args.figures / "tuning.json").read_text())
        write(path, measure(Study(args.work.resolve(), args.jobs, tuple(extra)), tuned))
    report = json.loads(path.read_text())
    draw(report, path.with_suffix(".png"))
    print(f"{table(report)}\n\n{rates_table(report, 'adam')}")


if __name__ == "__main__":
    main()
