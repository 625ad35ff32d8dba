"""The picture of ``megatron-muon curves``; it imports matplotlib, which is an extra."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_muon.lab.curves.comparison import Comparison
from megatron_muon.lab.curves.lead import envelope, smooth
from megatron_muon.lab.curves.runs import Run

_COLORS = ("#d1495b", "#0b6e4f", "#3b6ea5", "#d07a2d", "#7b5ea7", "#555555")


def draw(runs: Sequence[Run], comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw a row for each kind of loss: the curves, and the leading ratios with their bands.

    Args:
        runs: the runs; the first one is the baseline.
        comparisons: their comparisons.
        path: path of the file; its suffix selects the format.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(11, 3.6 * len(comparisons)), layout="constrained")
    rows = figure.subplots(len(comparisons), 2, squeeze=False)
    for (left, right), each in zip(rows, comparisons, strict=True):
        _losses(left, runs, each)
        _ratios(right, each)
    figure.savefig(path, dpi=120)


def _losses(axes: Axes, runs: Sequence[Run], each: Comparison) -> None:
    top = []
    for run, color in zip(runs, itertools.cycle(_COLORS), strict=False):
        for number, curve in enumerate(run.curves(each.kind) or ()):
            points = envelope(smooth(curve.points, each.window))
            later = [loss for step, loss in points if step >= 0.1 * curve.last_step]
            top.append(max(later))
            label = run.name if number == 0 else None
            axes.plot(*zip(*curve.points, strict=True), color=color, alpha=0.25, lw=0.8)
            axes.plot(*zip(*points, strict=True), color=color, lw=1.8, label=label)
    axes.set_ylim(top=max(top))  # the fall of the first steps would flatten all that follows
    axes.set_xlabel("step")
    axes.set_ylabel({"other": "loss on other text"}.get(each.kind, f"{each.kind} loss"))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _ratios(axes: Axes, each: Comparison) -> None:
    baseline = each.endings[0].name
    for other, color in zip(each.others, itertools.cycle(_COLORS[1:]), strict=False):
        known = [lead for lead in other.leads if lead.ratio is not None]
        steps = [lead.step for lead in known]
        ratios = [lead.ratio for lead in known if lead.ratio is not None]
        axes.plot(steps, ratios, color=color, marker="o", label=other.name)
        lowest, highest = ([end(lead.ratios) for lead in known] for end in (min, max))
        axes.fill_between(steps, lowest, highest, color=color, alpha=0.2)
    axes.axhline(0, color="gray", lw=0.8)
    axes.set_xlabel(f"S, step of {baseline}")
    axes.set_ylabel("leading ratio (S - s) / s")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
