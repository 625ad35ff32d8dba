"""Compares a Muon and an AdamW run: writes summary.json and loss.png, prints a short
table.

python summary.py out/muon.json out/adamw.json --out out
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from plot import plot_losses

Run = dict[str, Any]
Point = list[float]


def first_step_at(curve: list[Point], target: float) -> float | None:
    """The first step, linearly interpolated, at which a curve of [step, loss] is <=
    target.
    """
    if curve[0][1] <= target:
        return curve[0][0]
    for (step, loss), (later_step, later_loss) in pairwise(curve):
        if later_loss <= target:
            return step + (later_step - step) * (loss - target) / (loss - later_loss)
    return None


def leading_ratio(muon: Run, adamw: Run) -> float | None:
    """(S - s) / s: how many more steps AdamW took to its final validation loss than
    Muon.

    S is both runs' number of steps, s the step at which Muon's validation loss first
    reaches AdamW's final one. None if it never does. Both schedules have decayed by S
    but Muon's has not at s, so this is biased against Muon.
    """
    step = first_step_at(muon["curve"]["validation"], adamw["figures"]["val_loss"])
    return None if not step else (muon["figures"]["steps"] - step) / step


def compare(muon: Run, adamw: Run) -> dict[str, Any]:
    """The summary of two runs that must differ in nothing but optimizer and learning
    rate.
    """
    for name, one, other in (
        ("optimizer", (muon["optimizer"], adamw["optimizer"]), ("muon", "adam")),
        ("topology", muon["topology"], adamw["topology"]),
        ("corpus_sha256", muon["corpus_sha256"], adamw["corpus_sha256"]),
        ("seed", muon["seed"], adamw["seed"]),
        ("steps", muon["figures"]["steps"], adamw["figures"]["steps"]),
    ):
        if one != other:
            raise ValueError(
                f"these runs cannot be compared: {name} is {one}, not {other}"
            )
    return {
        "topology": muon["topology"],
        "corpus_sha256": muon["corpus_sha256"],
        "muon": muon["figures"],
        "adamw": adamw["figures"],
        "leading_ratio": leading_ratio(muon, adamw),
    }


def table(summary: dict[str, Any]) -> str:
    """The summary for a terminal; of per-rank figures the largest."""
    rows: list[tuple[str, str, float]] = [
        ("validation loss (nats/byte)", "val_loss", 1),
        ("training loss", "train_loss", 1),
        ("learning rate", "lr", 1),
        ("steps", "steps", 1),
        ("step, ms (median)", "step_ms", 1),
        ("  of it optimizer, ms", "optimizer_ms", 1),
        ("optimizer + main params, KiB/rank", "state_bytes_per_rank", 1024),
        ("grads + params sent, KiB/rank", "adamw_bytes_per_rank", 1024),
        ("Muon's exchange sent, KiB/rank", "exchange_bytes_per_rank", 1024),
        ("Newton-Schulz, Mflop/rank", "ns_flops_per_rank", 1e6),
        ("matrices orthogonalized", "matrices", 1),
    ]
    topology = " x ".join(f"{k.upper()}{v}" for k, v in summary["topology"].items())
    lines = [f"{topology:<34}{'Muon':>12}{'AdamW':>12}"]
    for label, key, unit in rows:
        cells = "".join(
            f"{_cell(summary[run][key], unit):>12}" for run in ("muon", "adamw")
        )
        lines.append(f"{label:<34}{cells}")
    lines.append(_verdict(summary))
    return "\n".join(lines)


def _cell(value: float | list[float], unit: float) -> str:
    number = (max(value) if isinstance(value, list) else value) / unit
    if isinstance(number, float) and number < 10:
        return f"{number:.4g}"
    return f"{number:.0f}" if number == int(number) else f"{number:.1f}"


def _verdict(summary: dict[str, Any]) -> str:
    ratio, steps = summary["leading_ratio"], summary["muon"]["steps"]
    if ratio is None:
        return f"Muon did not reach AdamW's final validation loss in {steps} steps."
    reached = steps / (1 + ratio)
    return (
        f"Muon reached AdamW's final validation loss at step {reached:.1f} of {steps}"
        f" (leading ratio {ratio:.2f})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("muon", type=Path)
    parser.add_argument("adamw", type=Path)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the results"
    )
    args = parser.parse_args()
    muon, adamw = (json.loads(path.read_text()) for path in (args.muon, args.adamw))
    summary = compare(muon, adamw)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot_losses({"Muon": muon, "AdamW": adamw}, args.out / "loss.png")
    print(table(summary))
    print(f"Wrote {args.out / 'loss.png'} and {args.out / 'summary.json'}")


if __name__ == "__main__":
    main()
