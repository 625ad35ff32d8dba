"""The output of ``megatron-muon curves``: text for people, and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_muon.lab.curves.comparison import Beside, Comparison, Ending
from megatron_muon.lab.curves.curve import Kind
from megatron_muon.lab.curves.lead import WINDOWS, Lead, Need

_TITLES: dict[Kind, str] = {
    "train": "training loss",
    "validation": "validation loss",
    "other": "loss on other text",
}


def as_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """All figures, by kind of loss; a pair of seeds that never reaches a loss is missing."""
    return {
        each.kind: {
            "window": each.window,
            "runs": [asdict(ending) for ending in each.endings],
            "beside_first": [
                {
                    "name": other.name,
                    "leads": [{**asdict(lead), "ratio": lead.ratio} for lead in other.leads],
                    "needs": [asdict(need) for need in other.needs],
                    "by_window": dict(zip(map(str, WINDOWS), other.by_window, strict=True)),
                    "hangs_on_window": other.hangs_on_window,
                }
                for other in each.others
            ],
        }
        for each in comparisons
    }


def as_text(comparisons: Sequence[Comparison]) -> str:
    """A part for each kind of loss, with a table for each run beside the first one."""
    lines: list[str] = []
    for each in comparisons:
        lines += [_TITLES[each.kind], "", *_endings(each.endings)]
        for other in each.others:
            lines += ["", *_beside(each.endings[0].name, other)]
        lines.append("")
    return "\n".join(lines).rstrip()


def _endings(endings: Sequence[Ending]) -> list[str]:
    rows = [["run", "seeds", "steps", "last loss", ""]]
    for each in endings:
        note = f"{each.dropped} losses were not finite" if each.dropped else ""
        loss = _spread(statistics.median(each.losses), each.losses, "{:.4f}")
        rows.append([each.name, str(len(each.losses)), f"{each.steps:g}", loss, note])
    return _aligned(rows)


def _beside(baseline: str, other: Beside) -> list[str]:
    rows = [[f"S, {baseline}", "loss", f"s, {other.name}", "leading ratio (S - s) / s"]]
    rows += [_lead_row(lead) for lead in other.leads]
    lines = _aligned(rows)
    needs = [[f"step of {other.name}", "loss", f"{baseline} has it at step"]]
    needs += [_need_row(need) for need in other.needs]
    lines += ["", *_aligned(needs)]
    if other.hangs_on_window:
        values = ", ".join(
            f"{window:g}: {_number(ratio)}"
            for window, ratio in zip(WINDOWS, other.by_window, strict=True)
        )
        lines += [
            "",
            f"warning: the window decides the last ratio of {other.name} (part of the points in "
            f"a block: ratio; {values})",
        ]
    return lines


def _lead_row(lead: Lead) -> list[str]:
    reached, ratio = "never", "never"
    if lead.ratio is not None:
        reached = _spread(statistics.median(lead.reached), lead.reached, "{:.1f}")
        ratio = _spread(lead.ratio, lead.ratios, "{:.2f}")
    if 0 < len(lead.reached) < lead.pairs:
        ratio += f", {lead.pairs - len(lead.reached)} of {lead.pairs} pairs never"
    return [f"{lead.step:g}", f"{lead.loss:.4f}", reached, ratio]


def _need_row(need: Need) -> list[str]:
    step = "never" if need.baseline_step is None else f"{need.baseline_step:.1f}"
    return [f"{need.step:g}", f"{need.loss:.4f}", step]


def _spread(middle: float, values: Sequence[float], shape: str) -> str:
    text = shape.format(middle)
    if len(values) > 1:
        text += f" ({shape.format(min(values))} to {shape.format(max(values))})"
    return text


def _number(ratio: float | None) -> str:
    return "never" if ratio is None else f"{ratio:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
