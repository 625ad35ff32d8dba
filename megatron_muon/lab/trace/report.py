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


def as_text(runs: Sequence[Run]) -> str:
    """All tables: each run's ranks and collectives, then the runs side by side."""
    blocks = [
        block for run in runs for block in (_title(run), _ranks(run), _kinds(run))
    ]
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
    steps = (
        f"mean of {most if least == most else f'{least} to {most}'} "
        f"step{'s' * (most > 1)}"
    )
    steps = steps if least else "no marks of steps: the whole trace is taken as one"
    device = "/".join(sorted(set(run.ranks["device"].str.upper())))
    return (
        f"{run.name}: {len(run.ranks)} rank{'s' * (len(run.ranks) > 1)}, "
        f"{device}, {steps}"
    )


def _ranks(run: Run) -> str:
    rows = times(run).drop(columns="overlapped").rename(index="rank {}".format)
    mean = rows.mean(skipna=False)
    most = rows.max()
    rows = pd.concat([rows, mean.to_frame("mean").T] if len(rows) > 1 else [rows])
    rows["optimizer, %"] = 100 * rows["optimizer"] / rows["step"]
    if "mean" in rows.index:
        rows.loc["largest / mean"] = (most / mean.where(mean != 0))[["step", "compute"]]
    return _table(rows.map(_number), "ms of a step")


def _kinds(run: Run) -> str:
    means = run.means().rename(columns={"exposed_ms": "exposed"})
    means["MB"] = means["bytes"] / 1e6
    shown = means[["count", "ms", "exposed", "MB", "GB/s", "bus GB/s"]].map(_number)
    return _table(shown, "collectives, mean over ranks")


def _beside(runs: Sequence[Run]) -> str:
    fields = {"ms": "ms", "exposed_ms": "exposed ms", "bytes": "MB"}
    kinds = pd.concat(
        [run.means()[list(fields)] for run in runs], axis=1, keys=range(len(runs))
    )
    absent = pd.concat(
        [kinds[at].isna().all(axis=1) for at in range(len(runs))], axis=1
    )
    parts = [pd.DataFrame([times(run).mean(skipna=False) for run in runs]).T]
    parts[0].loc["optimizer, %"] = (
        100 * parts[0].loc["optimizer"] / parts[0].loc["step"]
    )
    most = pd.Series([times(run)["compute"].max() for run in runs])
    parts[0].loc["compute, largest / mean"] = most / parts[0].loc["compute"].replace(
        0, math.nan
    )
    for field, title in fields.items():
        own = kinds.xs(field, axis=1, level=1).mask(absent, 0.0)  # unknown is not none
        parts.append(
            (own / 1e6 if field == "bytes" else own).rename(f"{title} in {{}}".format)
        )
    values = pd.concat(parts)
    shown = values.map(_number)
    for at in range(1, len(runs)):
        ratios = values[at] / values[0].where(values[0] != 0)
        shown[at] += ratios.map(
            lambda ratio: "" if pd.isna(ratio) else f" ({ratio:.2f})"
        )
    return _table(shown.set_axis([run.name for run in runs], axis=1), "ms of a step")


def _table(shown: pd.DataFrame, corner: str) -> str:
    rows = shown.reset_index().astype(str).values.tolist()
    return "\n".join(aligned([[corner, *map(str, shown.columns)], *rows]))


def _number(value: float) -> str:
    if pd.isna(value):
        return "-"
    return f"{value:.3g}" if value < 100 else f"{value:,.{0 if value >= 1000 else 1}f}"
