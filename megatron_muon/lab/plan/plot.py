"""The curves of ``megatron-muon plan --sweep``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.outputs import new_figure
from megatron_muon.lab.plan.rows import NAMES, TITLES
from megatron_muon.lab.plan.sweep import Point, Sweep


def plot(sweep: Sweep, made: Sequence[Point], path: Path) -> None:
    """Draw the time of each algorithm's step, and by how much a training step is longer.

    Args:
        sweep, made: see ``sweep.points``; values without a plan are left out.
        path: the file; see ``outputs.require_outputs``.

    Raises:
        OSError: the file cannot be written.
    """
    planned = [(point.value, point.plan) for point in made if point.plan is not None]
    figure = new_figure(11, 4.5)
    times, slower = figure.subplots(1, 2)
    for number, name in enumerate(NAMES):
        here = [(value, plan) for value, plan in planned if name in plan.names]
        places = [value for value, _ in here]
        if not here:
            continue
        style = {"label": TITLES[name], "color": f"C{number}", "marker": "o"}
        times.plot(places, [1e3 * plan.seconds(name) for _, plan in here], **style)
        if name != "adamw":
            slower.plot(places, [100 * plan.slower(name) for _, plan in here], **style)
    times.set_yscale("log")
    slower.set_yscale("log")
    times.set_ylabel("optimizer step, ms")
    slower.set_ylabel("training step longer than AdamW's, %")
    for axes in (times, slower):
        axes.set_xlabel(sweep.name)
        axes.grid(alpha=0.3)
    times.legend(fontsize="small")
    figure.savefig(path)
