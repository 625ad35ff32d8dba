"""Trains under several splits of the weights into matrices, each at its own best
learning rate.

    python splits.py                       # writes figures/splits.json and prints its table
    python splits.py --table               # prints the table of figures/splits.json again

Each run is the quickstart's training in one process, as in sweep.py, with half the
steps. For each split every rate is run with every seed; the rate with the lowest mean
counts. Runs that are already in the work folder with the same flags are not repeated.
"""  # noqa: E501

from __future__ import annotations

import argparse
import statistics
from typing import Any

from sweep import measure_and_print, run_all

RATES, SEEDS, STEPS = (5e-3, 1e-2, 2e-2, 4e-2), (1, 2, 3), 160
QKV, FC1 = "*.linear_qkv.weight", "*.linear_fc1.weight"
UP, DOWN = "*_up_proj.weight", "*.linear_kv_down_proj.weight"
MODELS: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {
        "q, k, v; fc1 whole (default)": (),
        "one qkv": (f"{QKV}=whole",),
        "heads": (f"{QKV}=heads",),
        "gate and up": (f"{FC1}=gate-up",),
        "heads; gate and up": (f"{QKV}=heads", f"{FC1}=gate-up"),
    },
    "latent attention": {
        "whole (default)": (),
        "up-projections by head": (f"{UP}=heads",),
        "up-projections by head; latent and rope": (f"{UP}=heads", f"{DOWN}=parts"),
    },
}
FLAGS = {"attention": [], "latent attention": ["--multi-latent-attention"]}


def measure(args: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """Runs all splits at all rates with all seeds."""
    report: dict[str, Any] = {
        "rates": RATES,
        "seeds": SEEDS,
        "steps": STEPS,
        "models": {},
    }
    corpora = set()
    for model, splits in MODELS.items():
        rows = report["models"].setdefault(model, {})
        for name, patterns in splits.items():
            flags = [word for pattern in patterns for word in ("--muon-split", pattern)]
            keys = [("muon", rate, seed) for rate in RATES for seed in SEEDS]
            steps = ["--train-iters", str(STEPS)]
            runs = run_all(
                keys, args.work, args.jobs, [*FLAGS[model], *steps, *flags, *extra]
            )
            corpora |= {run["corpus_sha256"] for run in runs.values()}
            losses = {
                rate: [runs["muon", rate, seed]["val_loss"] for seed in SEEDS]
                for rate in RATES
            }
            best = min(losses, key=lambda rate: statistics.fmean(losses[rate]))
            rows[name] = {"splits": patterns, "lr": best, "val_losses": losses}
    if len(corpora) != 1:
        raise ValueError(
            f"runs in {args.work} saw different texts, {corpora}: empty it"
        )
    return {**report, "corpus_sha256": corpora.pop()}


def table(report: dict[str, Any]) -> str:
    """In Markdown; the difference is that of the same seeds, with its standard
    error.
    """
    lines = [
        "| model | matrices | lr | validation loss, 3 seeds | beside the default |"
    ]
    lines.append("|---|---|--:|--:|--:|")
    for model, rows in report["models"].items():
        at_best = {
            name: row["val_losses"][str(row["lr"])] for name, row in rows.items()
        }
        default = next(iter(at_best.values()))
        for name, losses in at_best.items():
            apart = [a - b for a, b in zip(losses, default, strict=True)]
            error = statistics.stdev(apart) / len(apart) ** 0.5
            beside = (
                f"{statistics.fmean(apart):+.4f} ± {error:.4f}" if any(apart) else ""
            )
            mean, spread = statistics.fmean(losses), max(losses) - min(losses)
            lines.append(
                f"| {model} | {name} | {rows[name]['lr']:g} | {mean:.4f}, spread "
                f"{spread:.4f} | {beside} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    measure_and_print("splits", __doc__, measure, table)
