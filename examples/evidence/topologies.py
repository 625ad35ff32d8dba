"""The tables of compare.py's reports; as a script it prints those of figures/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parent / "figures"
MB = 1e6


def table(found: dict[str, Any]) -> str:
    """A row for each topology: Muon's step beside AdamW's, and both beside the plan."""
    head = [
        "topology",
        "time of a step beside AdamW's",
        "bytes beside AdamW's",
        "exchange, MB",
    ]
    head += ["planned", "fullest rank's state, AdamW, Muon, MB", "planned"]
    rows = []
    for each in found["topologies"]:
        adamw, muon, planned = each["adamw"], each["muon"], each["predicted"]
        ratio = each["byte_ratio"]
        rows.append(
            [
                each["name"],
                f"{muon['step_ms'] / adamw['step_ms']:.2f}",
                "AdamW sends none" if ratio is None else f"{ratio:.3f}",
                f"{muon['exchange'] / MB:.3f}",
                f"{planned['exchange'] / MB:.3f}",
                f"{adamw['state_bytes'] / MB:.2f}, {muon['state_bytes'] / MB:.2f}",
                f"{planned['adamw_state'] / MB:.2f}, {planned['muon_state'] / MB:.2f}",
            ]
        )
    return markdown(head, rows)


def peaks(found: dict[str, Any]) -> str:
    """A row for each topology: state beside the plan's, and the peak of a step above
    it.
    """
    head = ["topology"]
    rows = [[each["name"]] for each in found["topologies"]]
    for name, title in (("adamw", "AdamW"), ("muon", "Muon")):
        head += [f"{title}: state, MB", "planned", "peak above it"]
        for row, each in zip(rows, found["topologies"], strict=True):
            planned = each["predicted"][f"{name}_state"]
            cells = each[name]["state_bytes"], planned, each[name]["peak_bytes"]
            row += [f"{nbytes / MB:.3f}" for nbytes in cells]
    return markdown(head, rows)


def times_and_losses(found: dict[str, Any]) -> str:
    """A row for each topology: a step, the optimizer's share of it, first and last
    loss.
    """
    head = ["topology", *("step, ms", "optimizer", "first, last loss") * 2]
    head[1], head[4] = (f"{name}: step, ms" for name in ("AdamW", "Muon"))
    rows = []
    for each in found["topologies"]:
        rows.append([each["name"]])
        for one in (each["adamw"], each["muon"]):
            share, losses = one["optimizer_ms"] / one["step_ms"], one["losses"]
            rows[-1] += [
                f"{one['step_ms']:.1f}",
                f"{one['optimizer_ms']:.1f} ({share:.0%})",
            ]
            rows[-1].append(f"{losses[0]:.3f}, {losses[-1]:.3f}")
    return markdown(head, rows)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|---|{'--:|' * (len(head) - 1)}", *lines[1:]])


if __name__ == "__main__":
    for file, made in (("compare", table), ("memory", peaks)):
        print(made(json.loads((FIGURES / f"{file}.json").read_text())), end="\n\n")
