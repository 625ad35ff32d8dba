"""The picture of ``megatron-muon trace report``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.outputs import new_figure
from megatron_muon.lab.trace.rank_trace import RankTrace
from megatron_muon.lab.trace.report import times
from megatron_muon.lab.trace.runs import Run
from megatron_muon.lab.trace.spans import Spans

_MOST = 9  # lanes of collectives; the shortest are left out
_COLORS = {"compute alone": "#3b6ea5", "overlapped": "#8fb3d6"}
_COLORS |= {"exposed communication": "#d07a2d", "idle": "#dddddd"}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw a bar for each rank, and the last step of each run's first rank."""
    rows = [(f"{run.name}, rank {at}", rank) for run in runs for at, rank in times(run).iterrows()]
    pictures = [lanes(run.first) for run in runs]
    heights = [0.9 + 0.28 * len(rows), *(0.7 + 0.24 * len(each) for each in pictures)]
    figure = new_figure(9, 0.4 + sum(heights))
    bars, *others = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for row, (_, rank) in enumerate(rows):
        parts = (rank.compute - rank.overlapped, rank.overlapped, rank.exposed, rank.idle)
        left = 0.0
        for (label, color), part in zip(_COLORS.items(), parts, strict=True):
            bars.barh(row, part, left=left, color=color, label=label if row == 0 else None)
            left += part
    bars.set_yticks(range(len(rows)), [_plain(label) for label, _ in rows])
    bars.set_xlabel("ms of a step")
    bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    for axes, run, own in zip(others, runs, pictures, strict=True):
        for row, (is_traffic, spans) in enumerate(own.values()):
            color = _COLORS["exposed communication" if is_traffic else "compute alone"]
            axes.broken_barh(spans, (row - 0.4, 0.8), color=color)
        axes.set_yticks(range(len(own)), map(_plain, own), fontsize="small")
        axes.set_title(f"{_plain(run.name)}, rank {run.ranks.index[0]}, one step", loc="left")
        axes.set_xlabel("ms")
    for axes in (bars, *others):
        axes.invert_yaxis()
    figure.savefig(path)


def lanes(trace: RankTrace) -> dict[str, tuple[bool, list[tuple[float, float]]]]:
    """By name: whether a lane is communication, and (start, length) of its bars in ms."""
    begin, end = trace.steps[-1]
    step, gap = Spans([(begin, end)]), (end - begin) / 2000  # smaller gaps are not drawn
    kinds: dict[str, Spans] = defaultdict(Spans)
    for call in trace.calls:
        kinds[f"{call.operation} {call.place}".strip()].add(call.start, call.stop)
    longest = sorted(kinds, key=lambda name: -kinds[name].length(step))[:_MOST]
    # on a GPU the host's phases are not when the kernels run
    work = {"compute": trace.compute, "optimizer": trace.optimizer or Spans()}
    work |= trace.phases if trace.device == "cpu" else {}
    drawn: dict[str, tuple[bool, list[tuple[float, float]]]] = {}
    for name, own in [*work.items(), *((name, kinds[name]) for name in longest)]:
        edges = own.common(step).edges().tolist()
        wide = Spans((a, b + gap) for a, b in zip(edges[::2], edges[1::2], strict=True)).edges()
        bars = [((a - begin) / 1e3, (b - gap - a) / 1e3) for a, b in wide.reshape(-1, 2).tolist()]
        drawn |= {name: (name in longest, bars)} if bars else {}
    return drawn


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # else matplotlib takes it for a formula
