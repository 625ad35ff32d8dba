"""Trains with AdamW, with Muon, and with each other rule for matrices, each at its best
rate.

    python rules.py                        # writes figures/rules.json, prints its table
    python rules.py --only hyperball       # these rows alone; others stay as they are
    python rules.py --larger               # 3.3 M parameters: figures/rules_larger.json
    python rules.py --table                # prints the table again

The model, the text and the steps are convergence.py's "as tuned", and so are momentum,
warm-up and, for rules that take one, weight decay: they were tuned for Muon, not for
the other rules. Rates are powers of two times a first one; where the best is the first
or last of them, the next one is tried, too. The best is repeated with two more seeds.
The larger model starts with each rule's best rate of the small one, half of it and
twice it. Runs that are in the work folder are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convergence import SEEDS, tuned_flags
from reports import lead
from training import HERE, Study, best, write


@dataclass(frozen=True)
class Row:
    """An optimizer, its flags beside the tuned ones, and the rates to try."""

    label: str
    optimizer: str
    rates: tuple[float, ...]
    flags: str = ""


def _rule(label: str, rates: tuple[float, ...], flags: str = "") -> Row:
    return Row(label, "muon", rates, f"--muon-rule {label.lower()} {flags}".strip())


# the model of convergence.py's "large"
LARGER = (
    "--num-layers 6 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 6"
)
ROWS = {
    "adamw": Row("AdamW", "adam", (2.5e-3, 5e-3, 1e-2)),
    "muon": Row("Muon", "muon", (1e-2, 2e-2, 4e-2)),
    "hyperball": _rule("Hyperball", (2e-2, 4e-2, 8e-2, 0.16), "--weight-decay 0"),
    "normuon": _rule("NorMuon", (1e-2, 2e-2, 4e-2)),
    "namo": _rule("NAMO", (1e-2, 2e-2, 4e-2, 8e-2)),
}


def _larger(row: Row, small: dict[str, Any]) -> Row:
    """A row for the larger model, by what the small one found."""
    best_rate = small["lr"]
    rates = best_rate / 2, best_rate, 2 * best_rate
    return replace(row, rates=rates, flags=f"{row.flags} {LARGER}")


def measure(study: Study, row: Row, tuned: dict[str, Any]) -> dict[str, Any]:
    """The runs of a row at its best rate."""
    flags = f"{tuned_flags(tuned, row.optimizer)} {row.flags}"
    tried = study.searched(row.optimizer, row.rates, SEEDS[:1], flags)
    rate = best(tried)
    return {
        "flags": row.flags,
        "lr": rate,
        "tried": {f"{one:g}": seeds[0]["loss"] for one, seeds in tried.items()},
        "runs": study.losses(row.optimizer, (rate,), SEEDS, flags)[rate],
    }


def table(report: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        "| rule | lr: loss of seed 1 | best lr | loss, three seeds | leading ratio |",
        "|---|---|--:|--:|--:|",
    ]
    for name, row in ROWS.items():
        if name not in report:
            continue
        found = report[name]
        tried = (
            f"{rate}: {'diverged' if loss is None else f'{loss:.3f}'}"
            for rate, loss in found["tried"].items()
        )
        losses = [run["loss"] for run in found["runs"]]
        cells = [
            row.label,
            ", ".join(tried),
            f"{found['lr']:g}",
            f"{statistics.fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
            "" if name == "adamw" else _lead(report["adamw"], found),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _lead(adamw: dict[str, Any], rule: dict[str, Any]) -> str:
    found = lead({"adam": adamw, "muon": rule})
    if found.ratio is None:
        return "never"
    return f"{found.ratio:.2f} ({min(found.ratios):.2f} to {max(found.ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--larger", action="store_true")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=HERE / "out" / "rules")
    parser.add_argument("--figures", type=Path, default=HERE / "figures")
    args, extra = parser.parse_known_args()  # the rest goes to train.py
    rows = ROWS
    path = args.figures / "rules.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    if args.larger:
        rows = {name: _larger(ROWS[name], report[name]) for name in args.only}
        path = args.figures / "rules_larger.json"
        report = json.loads(path.read_text()) if path.exists() else {}
    if not args.table:
        tuned = json.loads((args.figures / "tuning.json").read_text())
        study = Study(args.work, args.jobs, tuple(extra))
        for name in args.only:
            report[name] = measure(study, rows[name], tuned)
            write(path, {each: report[each] for each in ROWS if each in report})
    print(table(report))


if __name__ == "__main__":
    main()
