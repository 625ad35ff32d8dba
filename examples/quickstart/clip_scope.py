"""Trains with gradients clipped at several norms, of all parameters and of AdamW's
only.

    python clip_scope.py                   # writes figures/clip_scope.json and prints its table
    python clip_scope.py --table           # prints the table of figures/clip_scope.json again

Each run is the quickstart's training in one process, as in sweep.py, with half the
steps, at Muon's best rate. Runs that are already in the work folder with the same flags
are not repeated.
"""  # noqa: E501

from __future__ import annotations

import argparse
import statistics
from typing import Any

from sweep import measure_and_print, run_all

CLIPS, SCOPES, SEEDS = (1.0, 0.1, 0.01), ("all", "adamw"), (1, 2, 3)
RATE, STEPS = 2e-2, 160


def measure(args: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """Runs each clip with each scope and each seed."""
    rows = []
    for clip in CLIPS:
        for scope in SCOPES:
            flags = ["--train-iters", str(STEPS), "--clip-grad", str(clip)]
            flags += ["--muon-clip-scope", scope]
            keys = [("muon", RATE, seed) for seed in SEEDS]
            runs = run_all(keys, args.work, args.jobs, [*flags, *extra])
            losses = [runs[key]["val_loss"] for key in keys]
            rows.append({"clip": clip, "scope": scope, "val_losses": losses})
    return {"lr": RATE, "steps": STEPS, "seeds": SEEDS, "rows": rows}


def table(report: dict[str, Any]) -> str:
    """In Markdown; the difference is that of the same seeds, with its standard
    error.
    """
    lines = [
        "| `--clip-grad` | scope | validation loss, 3 seeds | beside `all` |",
        "|--:|---|--:|--:|",
    ]
    for row in report["rows"]:
        losses = row["val_losses"]
        if row["scope"] == "all":
            of_all = losses
        apart = [a - b for a, b in zip(losses, of_all, strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5
        beside = (
            f"{statistics.fmean(apart):+.4f} ± {error:.4f}"
            if row["scope"] != "all"
            else ""
        )
        spread = max(losses) - min(losses)
        lines.append(
            f"| {row['clip']:g} | `{row['scope']}` | {statistics.fmean(losses):.4f}, "
            f"spread {spread:.4f} | {beside} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    measure_and_print("clip_scope", __doc__, measure, table)
