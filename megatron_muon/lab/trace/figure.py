"""The picture of ``megatron-muon trace report``; it imports matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_muon.lab.traces.lanes import Lane
from megatron_muon.lab.traces.measure import RankTimes, RunTimes

_COLORS = {
    "compute": "#3b6ea5",
    "overlapped": "#8fb3d6",
    "exposed": "#d07a2d",
    "idle": "#dddddd",
}


def draw(runs: Sequence[RunTimes], timelines: Sequence[Sequence[Lane]], path: Path) -> None:
    """Draw a bar for each rank, and the lanes of one rank of each run.

    Args:
        runs: the runs.
        timelines: the lanes of each run's first rank.
        path: path of the file; its suffix selects the format.

    Raises:
        ValueError: matplotlib does not write that format.
        OSError: the file cannot be written.
    """
    bars = 0.9 + 0.28 * sum(len(run.ranks) for run in runs)
    heights = [bars, *(0.7 + 0.24 * len(lanes) for lanes in timelines)]
    figure = Figure(figsize=(9, 0.4 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _bars(axes[0], runs)
    last = max((at + long for lanes in timelines for lane in lanes for at, long in lane.spans))
    for own, run, lanes in zip(axes[1:], runs, timelines, strict=True):
        _timeline(own, f"{run.name}, rank {run.ranks[0].rank}, one step", lanes, last)
    figure.savefig(path)


def _bars(axes: Axes, runs: Sequence[RunTimes]) -> None:
    ranks = [(run.name, rank) for run in runs for rank in run.ranks]
    left = [0.0] * len(ranks)
    for label, color in _COLORS.items():
        widths = [_part(label, rank) for _, rank in ranks]
        name = {"compute": "compute alone", "exposed": "exposed communication"}.get(label, label)
        axes.barh(range(len(ranks)), widths, left=left, color=color, label=name)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(ranks)), [f"{name}, rank {rank.rank}" for name, rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)


def _part(label: str, rank: RankTimes) -> float:
    if label == "compute":
        return rank.compute_ms - rank.overlapped_ms
    return float(getattr(rank, f"{label}_ms"))


def _timeline(axes: Axes, title: str, lanes: Sequence[Lane], last: float) -> None:
    for row, lane in enumerate(lanes):
        color = _COLORS["exposed" if lane.is_traffic else "compute"]
        axes.broken_barh(list(lane.spans), (row - 0.4, 0.8), color=color)
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes], fontsize="small")
    axes.set_xlim(0, last)
    axes.invert_yaxis()
    axes.set_title(title, fontsize="medium", loc="left")
    axes.set_xlabel("ms")
