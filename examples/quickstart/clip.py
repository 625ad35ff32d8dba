"""Trains with and without QK-Clip at a rate at which attention logits explode, and
draws them.

    python clip.py                         # writes figures/clip.json and clip.png, prints a table
    python clip.py --draw                  # runs nothing: draws and prints figures/clip.json again

Each run is the quickstart's training in one process, as in sweep.py, with half the
steps. The model that explodes has one head in place of four and five times Muon's best
rate. Runs that are already in the work folder with the same flags are not repeated.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from sweep import HERE, run_all

THRESHOLD, SEEDS, STEPS = 100.0, (1, 2, 3), 160
EXPLODES = ("--num-attention-heads", "1")
RUNS: dict[str, tuple[float, tuple[str, ...]]] = {
    "1 head, lr 0.1": (0.1, EXPLODES),
    "1 head, lr 0.1, clip": (0.1, (*EXPLODES, "--muon-qk-clip", f"{THRESHOLD:g}")),
    "4 heads, lr 0.02 (quickstart)": (0.02, ()),
}


def measure(args: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """Runs all with all seeds; each step's largest logit and training loss."""
    report: dict[str, Any] = {
        "threshold": THRESHOLD,
        "steps": STEPS,
        "seeds": SEEDS,
        "runs": {},
    }
    corpora = set()
    for name, (rate, flags) in RUNS.items():
        keys = [("muon", rate, seed) for seed in SEEDS]
        steps = ["--train-iters", str(STEPS), "--log-max-attention-logit"]
        runs = run_all(keys, args.work, args.jobs, [*steps, *flags, *extra])
        if any(run["val_loss"] is None for run in runs.values()):
            raise ValueError(f"a run of {name!r} diverged: see {args.work}")
        corpora |= {run["corpus_sha256"] for run in runs.values()}
        report["runs"][name] = {
            "flags": ["--lr", f"{rate:g}", *flags],
            "logits": [
                [round(value, 2) for _, value in run["max_attention_logit"]]
                for run in runs.values()
            ],
            "train": [
                [round(value, 4) for _, value in run["train"]] for run in runs.values()
            ],
            "val_losses": [run["val_loss"] for run in runs.values()],
        }
    if len(corpora) != 1:
        raise ValueError(
            f"runs in {args.work} saw different texts, {corpora}: empty it"
        )
    return {**report, "corpus_sha256": corpora.pop()}


def table(report: dict[str, Any]) -> str:
    """In Markdown: of each setting the largest logits and the losses, of its seeds."""
    lines = [
        "| run | largest logit, 3 seeds | steps above the threshold | validation loss |"
    ]
    lines.append("|---|--:|--:|--:|")
    for name, run in report["runs"].items():
        largest = ", ".join(f"{max(each):.0f}" for each in run["logits"])
        above = [
            sum(value > report["threshold"] for value in each) for each in run["logits"]
        ]
        losses = run["val_losses"]
        spread = max(losses) - min(losses)
        lines.append(
            f"| {name} | {largest} | {', '.join(map(str, above))} of {report['steps']} "
            f"| {statistics.fmean(losses):.3f}, spread {spread:.3f} |"
        )
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    """Each step's largest logit, and the training loss as a mean over 8 steps; a line
    per seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (logits, losses) = pyplot.subplots(
        1, 2, figsize=(10, 4), layout="constrained"
    )
    styles = (("#c44e52", "-"), ("#4c72b0", "--"), ("#8c8c8c", "-."))
    for (name, run), (color, line) in zip(report["runs"].items(), styles, strict=True):
        for number, (logit, loss) in enumerate(
            zip(run["logits"], run["train"], strict=True)
        ):
            steps = range(1, len(logit) + 1)
            label = name if number == 0 else None
            logits.plot(steps, logit, line, color=color, linewidth=1, label=label)
            smooth = [
                statistics.fmean(loss[at : at + 8]) for at in range(len(loss) - 7)
            ]
            losses.plot(range(8, len(loss) + 1), smooth, line, color=color, linewidth=1)
    logits.axhline(report["threshold"], color="black", linestyle=":", linewidth=1)
    logits.text(
        1, report["threshold"] * 1.1, f"threshold {report['threshold']:g}", fontsize=9
    )
    logits.set(
        yscale="log", xlabel="step", ylabel="largest attention logit of the step"
    )
    losses.set(xlabel="step", ylabel="training loss, mean of 8 steps")
    losses.set_title("loss of the same runs")
    logits.set_title("attention logits, a line for each seed")
    logits.legend(frameon=False, fontsize=9, loc="lower right")
    for axes in (logits, losses):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--work", type=Path, default=HERE / "out" / "clip", help="single runs"
    )
    parser.add_argument(
        "--figures", type=Path, default=HERE / "figures", help="the results"
    )
    args, extra = parser.parse_known_args()  # the rest goes to train.py
    path = args.figures / "clip.json"
    if not args.draw:
        report = measure(args, extra)
        args.figures.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report) + "\n")
    report = json.loads(path.read_text())
    draw(report, args.figures / "clip.png")
    print(table(report))


if __name__ == "__main__":
    main()
