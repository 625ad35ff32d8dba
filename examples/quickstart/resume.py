"""Draws what a checkpoint keeps: resumes at other topologies, and switches of the
optimizer.

    python resume.py           # writes figures/resume.json and figures/resume.png
    python resume.py --draw    # the picture alone, from figures/resume.json

Left: one Muon run that is saved and resumed three times, each time at another topology,
beside one that never stops. Right: half-way from AdamW to Muon and back, beside no
switch. All have the quickstart's model, data and learning rates (gpt.args), and a
schedule over ``--steps`` steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
RATES = {"muon": "1e-2", "adam": "2e-3"}
TOPOLOGIES = [(2, 1, 2), (1, 2, 1), (1, 1, 4), (1, 1, 1)]  # TP, PP, DP of each quarter
Curve = list[list[float]]


def run(
    work: Path,
    name: str,
    optimizer: str,
    steps: int,
    *flags: str,
    topology: tuple[int, int, int] = (1, 1, 1),
) -> Curve:
    """Trains one piece of a run; returns the training loss of each of its steps."""
    tp, pp, dp = topology
    figures = work / f"{name}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        f"--nproc-per-node={tp * pp * dp}",
        str(HERE / "train.py"),
        f"@{HERE / 'gpt.args'}",
    ]
    command += [
        "--tensor-model-parallel-size",
        str(tp),
        "--pipeline-model-parallel-size",
        str(pp),
    ]
    command += ["--micro-batch-size", str(16 // dp), "--optimizer", optimizer]
    command += [
        "--lr",
        RATES[optimizer],
        "--train-iters",
        str(steps),
        "--figures",
        str(figures),
    ]
    with (work / f"{name}.log").open("w") as log:
        subprocess.run(
            [*command, *flags], stdout=log, stderr=subprocess.STDOUT, check=True
        )
    curve: Curve = json.loads(figures.read_text())["curve"]["train"]
    print(
        f"{name}: steps {curve[0][0]} to {curve[-1][0]}, loss {curve[-1][1]:.4f}",
        flush=True,
    )
    return curve


def resumed(work: Path, steps: int) -> Curve:
    """Muon in four pieces, at four topologies."""
    curve: Curve = []
    for number, topology in enumerate(TOPOLOGIES):
        end = steps * (number + 1) // len(TOPOLOGIES)
        flags = ["--exit-at", str(end), "--save", str(work / f"quarter{number}")]
        if number:
            flags += ["--load", str(work / f"quarter{number - 1}")]
        curve += run(work, f"resumed{number}", "muon", steps, *flags, topology=topology)
    return curve


def switched(work: Path, steps: int) -> dict[str, Curve]:
    """From each optimizer to the other, half-way."""
    half = str(steps // 2)
    first = {
        optimizer: run(
            work, f"half-{optimizer}", optimizer, steps, "--exit-at", half,
            "--save", str(work / f"half-{optimizer}"),
        )
        for optimizer in RATES
    }  # fmt: skip
    adam, muon = (["--load", str(work / f"half-{name}")] for name in ("adam", "muon"))
    return {
        "AdamW": first["adam"] + run(work, "adamw", "adam", steps, *adam),
        "AdamW, then Muon, momentum from Adam's": first["adam"]
        + run(work, "to-muon", "muon", steps, *adam, "--from-other", "momentum"),
        "AdamW, then Muon, momentum from zero": first["adam"]
        + run(work, "to-muon-fresh", "muon", steps, *adam, "--from-other", "fresh"),
        "Muon, then AdamW": first["muon"]
        + run(work, "to-adamw", "adam", steps, *muon, "--from-other", "fresh"),
    }


# Wide and pale lines lie under narrow and dark ones, so that curves that coincide are
# both seen.
STYLES: dict[str, dict[str, Any]] = {
    "never stopped": {"color": "#8ec9ea", "lw": 4},
    "resumed": {"color": "#06283d", "lw": 1.1},
    "Muon": {"color": "#0072b2", "lw": 1.5},
    "AdamW": {"color": "#d55e00", "lw": 1.5, "ls": "--"},
    "AdamW, then Muon, momentum from Adam's": {"color": "#d9c3dc", "lw": 4},
    "AdamW, then Muon, momentum from zero": {"color": "#5b2a62", "lw": 1.1},
    "Muon, then AdamW": {"color": "#b08900", "lw": 1.5, "marker": ".", "ms": 5},
}
# A line below the title of each panel.
PANELS = (
    "one run stops at each dotted line, and resumes with the processes named there",
    "at the dotted line three runs change the optimizer; two keep it",
)


def draw(curves: dict[str, dict[str, Curve]], steps: int, path: Path) -> None:
    """Losses over steps; a curve with a switch is drawn from there on."""
    figure, axes = plt.subplots(
        1, 2, figsize=(12, 6.5), layout="constrained", sharey=True
    )
    panels = zip(axes, curves.items(), PANELS, strict=True)
    for axis, (title, group), explained in panels:
        for name, curve in group.items():
            own = curve[steps // 2 - 1 :] if "then" in name else curve
            axis.plot(*zip(*own, strict=True), label=name, **STYLES[name])
        axis.set_title(f"{title}\n{explained}", fontsize="medium")
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
    names = [f"TP{tp} PP{pp} DP{dp}" for tp, pp, dp in TOPOLOGIES]
    for number, name in enumerate(names):
        start = steps * number // len(names)
        axes[0].axvline(start, color="gray", lw=0.8, ls=":")
        axes[0].text(
            start + 1, 0.02, name, transform=axes[0].get_xaxis_transform(), fontsize=8
        )
    axes[1].axvline(steps // 2, color="gray", lw=0.8, ls=":")
    axes[1].set_xlim(left=steps / 3)  # the switch fills it; the left axis has the start
    axes[0].set_ylabel("training loss (nats per byte)")
    axes[0].set_ylim(top=3.2)  # the fall from ln 256 would flatten all that follows
    figure.savefig(path, dpi=130)


def said(curves: dict[str, dict[str, Curve]], steps: int) -> list[str]:
    """What the two panels show, a sentence each, as README.md says it."""
    resumed = curves["Muon, resumed at other topologies"]
    whole = _losses(resumed["never stopped"])
    apart = [
        abs(one - two)
        for one, two in zip(whole, _losses(resumed["resumed"]), strict=True)
    ]
    first_stop = steps // len(TOPOLOGIES)
    changes = [abs(two - one) for one, two in pairwise(whole[first_stop:])]
    switches = curves["switches of the optimizer"]
    to_adamw, kept = (_losses(switches[name]) for name in ("Muon, then AdamW", "Muon"))
    after = slice(steps // 2, steps // 2 + 5)
    rise = max(one - two for one, two in zip(to_adamw[after], kept[after], strict=True))
    return [
        f"Their losses differ by {median(apart):.3f} in the median, by at most "
        f"{max(apart):.3f}, at step {apart.index(max(apart)) + 1}, and after the first "
        f"stop by at most {max(apart[first_stop:]):.3f}",
        f"the loss itself changes by {median(changes):.2f} from step to step",
        f"From Muon to AdamW it rises to {rise:.2f} above the run that keeps Muon",
    ]


def _losses(curve: Curve) -> list[float]:
    return [loss for _, loss in curve]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--work", type=Path, default=HERE / "out" / "resume")
    parser.add_argument("--figures", type=Path, default=HERE / "figures")
    parser.add_argument(
        "--draw", action="store_true", help="only draw resume.json again"
    )
    args = parser.parse_args()
    if args.draw:
        report = json.loads((args.figures / "resume.json").read_text())
        draw(report["curves"], report["steps"], args.figures / "resume.png")
        print(*said(report["curves"], report["steps"]), sep="\n")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    args.figures.mkdir(parents=True, exist_ok=True)
    whole = run(args.work, "whole", "muon", args.steps)
    again = resumed(args.work, args.steps)
    curves: dict[str, dict[str, Any]] = {
        "Muon, resumed at other topologies": {"never stopped": whole, "resumed": again},
        "switches of the optimizer": {"Muon": whole, **switched(args.work, args.steps)},
    }
    report = {"steps": args.steps, "curves": curves}
    (args.figures / "resume.json").write_text(json.dumps(report) + "\n")
    draw(curves, args.steps, args.figures / "resume.png")
    print(*said(curves, args.steps), sep="\n")
    for name, curve in curves["switches of the optimizer"].items():
        last = [loss for _, loss in curve[-10:]]
        print(f"{name}: {sum(last) / len(last):.3f}, the mean of the last 10 steps")


if __name__ == "__main__":
    main()
