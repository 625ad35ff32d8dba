"""The tables of ``megatron-muon trace``, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from megatron_muon.lab.tables import aligned
from megatron_muon.lab.trace.runs import Run

TIMES = [
    "step",
    "compute",
    "communication",
    "overlapped",
    "exposed",
    "idle",
    "optimizer",
]
_SHARE = "optimizer, %"
_UNEVEN = "compute, largest / mean"
# Figures of collectives: the column, its title, its unit.
_FIELDS = (("ms", "ms", 1.0), ("exposed_ms", "exposed ms", 1.0), ("bytes", "MB", 1e6))


def as_text(runs: Sequence[Run]) -> str:
    """All tables: each run's ranks and collectives, then the runs side by side."""
    blocks: list[str] = []
    for run in runs:
        blocks += [_title(run), _ranks(run), _kinds(run)]
    if len(runs) > 1:
        blocks += [
            "side by side, means over ranks; in brackets over the first",
            _beside(runs),
        ]
    return "\n\n".join(blocks)


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """The same for programs: every figure of every rank, and the ratios to the first
    run.
    """
    means = pd.DataFrame([times(run).mean(skipna=False) for run in runs])
    return {
        "runs": [
            {
                "name": run.name,
                "ranks": _records(run.ranks.rename_axis(index="rank").reset_index()),
                "mean": _records(means)[at],
                "collectives_of_ranks": _records(run.kinds),
                "collectives": _records(run.means().reset_index()),
            }
            for at, run in enumerate(runs)
        ],
        "ratios": _records(means[1:] / means.iloc[0].where(means.iloc[0] != 0)),
    }


def times(run: Run) -> pd.DataFrame:
    """ms of the step and of its parts, of each rank."""
    return (
        run.ranks[[f"{each}_ms" for each in TIMES]]
        .astype(float)
        .set_axis(TIMES, axis=1)
    )


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dicts, with None for NaN."""
    rows: list[dict[str, Any]] = (
        frame.astype(object).where(frame.notna(), None).to_dict("records")
    )
    return rows


def _title(run: Run) -> str:
    least = int(run.ranks["steps"].min())
    most = int(run.ranks["steps"].max())
    number = f"{most}" if least == most else f"{least} to {most}"
    steps = f"mean of {number} step{'s' * (most > 1)}"
    if not least:
        steps = "no marks of steps: the whole trace is taken as one"
    device = "/".join(sorted(set(run.ranks["device"].str.upper())))
    size = len(run.ranks)
    return f"{run.name}: {size} rank{'s' * (size > 1)}, {device}, {steps}"


def _ranks(run: Run) -> str:
    rows = times(run).drop(columns="overlapped").rename(index="rank {}".format)
    mean = rows.mean(skipna=False)
    uneven = rows.max() / mean.where(mean != 0)
    rows = pd.concat([rows, mean.to_frame("mean").T] if len(rows) > 1 else [rows])
    rows[_SHARE] = 100 * rows["optimizer"] / rows["step"]
    if "mean" in rows.index:
        rows.loc["largest / mean"] = uneven[["step", "compute"]]
    return _table(rows, "ms of a step")


def _kinds(run: Run) -> str:
    means = run.means().rename(columns={"exposed_ms": "exposed"})
    means["MB"] = means["bytes"] / 1e6
    shown = means[["count", "ms", "exposed", "MB", "GB/s", "bus GB/s"]]
    return _table(shown, "collectives, mean over ranks")


def _table(shown: pd.DataFrame, corner: str) -> str:
    rows = shown.map(_number).reset_index().astype(str).values.tolist()
    return "\n".join(aligned([[corner, *map(str, shown.columns)], *rows]))


def _beside(runs: Sequence[Run]) -> str:
    """Means over ranks; behind those of later runs, in brackets, over the first's."""
    rows: dict[str, list[float]] = {part: [] for part in (*TIMES, _SHARE, _UNEVEN)}
    for run in runs:
        ms = times(run)
        mean = ms.mean(skipna=False)
        for part in TIMES:
            rows[part].append(mean[part])
        rows[_SHARE].append(100 * _over(mean["optimizer"], mean["step"]))
        rows[_UNEVEN].append(_over(ms["compute"].max(), mean["compute"]))
    kinds = [run.means() for run in runs]
    names: dict[str, None] = {}
    for of_run in kinds:
        names |= dict.fromkeys(of_run.index)
    for field, title, unit in _FIELDS:
        for name in names:  # a run without the collective has 0 of it, not an unknown
            values = [of_run[field].get(name, 0.0) / unit for of_run in kinds]
            rows[f"{title} in {name}"] = values
    lines = [["ms of a step", *(run.name for run in runs)]]
    for name, (first, *others) in rows.items():
        cells = [_number(first)]
        for value in others:
            ratio = _over(value, first)
            beside = "" if math.isnan(ratio) else f" ({ratio:.2f})"
            cells.append(_number(value) + beside)
        lines.append([name, *cells])
    return "\n".join(aligned(lines))


def _over(one: float, other: float) -> float:
    """A ratio; NaN where ``other`` is 0."""
    return one / other if other else math.nan


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    if value < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"
