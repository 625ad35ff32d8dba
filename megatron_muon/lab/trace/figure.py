"""The picture of ``megatron-muon trace``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from megatron_muon.lab.outputs import new_figure
from megatron_muon.lab.trace.report import times
from megatron_muon.lab.trace.runs import Run

_COLORS = {"compute": "#3b6ea5", "exposed": "#d07a2d", "idle": "#dddddd"}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw a bar for each rank: the parts of its step."""
    parts = pd.concat(
        [times(run).add_prefix(f"{run.name}, ", axis=0)[[*_COLORS]] for run in runs]
    )
    parts.index = parts.index.str.replace("$", r"\$")  # it begins matplotlib's formulas
    figure = new_figure(9, 1.3 + 0.28 * len(parts))
    bars = figure.subplots()
    parts.plot.barh(stacked=True, color=_COLORS, ax=bars)
    bars.set_xlabel("ms, mean of the traced steps")
    bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    bars.invert_yaxis()
    figure.savefig(path)
