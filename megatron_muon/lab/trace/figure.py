"""The picture of ``megatron-muon trace``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.outputs import new_figure
from megatron_muon.lab.trace.report import times
from megatron_muon.lab.trace.runs import Run

_COLORS = {"compute alone": "#3b6ea5", "overlapped": "#8fb3d6"}
_COLORS |= {"exposed communication": "#d07a2d", "idle": "#dddddd"}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw a bar for each rank."""
    rows = []
    for run in runs:
        for at, rank in times(run).iterrows():
            rows.append((f"{run.name}, rank {at}", rank))
    figure = new_figure(9, 1.3 + 0.28 * len(rows))
    bars = figure.subplots()
    for row, (_, rank) in enumerate(rows):
        alone = rank.compute - rank.overlapped
        parts = (alone, rank.overlapped, rank.exposed, rank.idle)
        left = 0.0
        for (label, color), part in zip(_COLORS.items(), parts, strict=True):
            named = label if row == 0 else None
            bars.barh(row, part, left=left, color=color, label=named)
            left += part
    # a $ begins a formula of matplotlib's
    bars.set_yticks(range(len(rows)), [label.replace("$", r"\$") for label, _ in rows])
    figure.suptitle("Where the time of a step goes, by rank", fontsize="medium")
    bars.set_xlabel("ms, mean of the traced steps")
    bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    bars.invert_yaxis()
    figure.savefig(path)
