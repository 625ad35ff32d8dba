"""The picture of ``megatron-muon curves``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_muon.lab.curves.lead import Curve, envelope, smooth
from megatron_muon.lab.outputs import new_figure

_COLORS = ("#d1495b", "#0b6e4f", "#3b6ea5", "#d07a2d", "#7b5ea7", "#555555")
_LINES = ("--", "-", "-.", ":")  # so that runs differ without colours, too


def draw(
    runs: dict[str, list[dict[str, Curve]]], found: dict[str, Any], path: Path
) -> None:
    """Draw a row for each kind of loss: the curves, and the leading ratios with their
    bands.
    """
    figure = new_figure(11, 3.6 * len(found))
    rows = figure.subplots(len(found), 2, squeeze=False)
    for (left, right), (kind, each) in zip(rows, found.items(), strict=True):
        top = []
        for number, (name, seeds) in enumerate(runs.items()):
            color = _COLORS[number % len(_COLORS)]
            line = _LINES[number % len(_LINES)]
            label = name.replace("$", r"\$")
            for seed in seeds:
                curve = envelope(smooth(seed[kind], each["window"]))
                top.append(curve.losses[curve.steps >= 0.1 * curve.steps[-1]].max())
                left.plot(*seed[kind][:2], color=color, alpha=0.25, lw=0.8)
                left.plot(
                    *curve[:2],
                    line,
                    color=color,
                    lw=1.8,
                    label=label if seed is seeds[0] else None,
                )
            if number:
                leads = each["beside_first"][number - 1]["leads"]
                known = [lead for lead in leads if lead["ratio"] is not None]
                steps = [lead["step"] for lead in known]
                low, high = (
                    [end(lead["ratios"]) for lead in known] for end in (min, max)
                )
                right.plot(
                    steps,
                    [lead["ratio"] for lead in known],
                    f"o{line}",
                    color=color,
                    label=label,
                )
                right.fill_between(steps, low, high, color=color, alpha=0.2)
        # the fall of the first steps would flatten all that follows
        left.set_ylim(top=max(top))
        smoothed = (
            f"means of {each['window']:.0%} of the points, " if each["window"] else ""
        )
        left.set_title(
            f"thin: as logged; thick: {smoothed}never rising", fontsize="medium"
        )
        left.set(xlabel="step", ylabel=f"{kind} loss")
        right.set_title(
            "median of all pairs of seeds, smallest to largest", fontsize="medium"
        )
        right.axhline(0, color="gray", lw=0.8)
        right.set(xlabel="S, step of the first run", ylabel="leading ratio (S - s) / s")
        for axes in (left, right):
            axes.grid(alpha=0.25)
            axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
