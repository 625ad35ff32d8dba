"""The tables of ``megatron-muon trace``, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from megatron_muon.lab.trace.runs import Run


def as_text(runs: Sequence[Run]) -> str:
    """Each run's ranks and collectives, then the runs side by side."""
    blocks: list[str] = []
    means: dict[str, pd.Series] = {}
    for run in runs:
        ms = times(run)
        mean = ms.mean(skipna=False)
        ms.loc["mean"] = mean
        ms.loc["largest / mean"] = ms.max() / mean.where(mean != 0)
        kinds = run.kinds.copy()
        kinds.insert(3, "MB", kinds.pop("bytes") / 1e6)
        steps, device = (
            "/".join(sorted(set(run.ranks[key].astype(str))))
            for key in ("steps", "device")
        )
        blocks.append(f"{run.name}: mean of {steps} steps on {device}")
        blocks.append(_table(ms, "ms of a step"))
        blocks.append(_table(kinds, "collectives, mean over ranks"))
        means[run.name] = pd.concat([mean, run.kinds["ms"]])
    if len(runs) > 1:
        blocks.append(
            _table(pd.concat(means, axis=1, sort=False), "side by side, ms of a step")
        )
    return "\n\n".join(blocks)


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """The same for programs; null is unknown."""
    tables = []
    for run in runs:
        ranks = _records(run.ranks.rename_axis(index="rank"))
        kinds = _records(run.kinds)
        tables.append({"name": run.name, "ranks": ranks, "collectives": kinds})
    return {"runs": tables}


def times(run: Run) -> pd.DataFrame:
    """ms of the step and of its parts, of each rank."""
    ms = run.ranks.filter(like="_ms").rename(columns=lambda part: part[:-3])
    return ms.rename(index="rank {}".format)


def _table(shown: pd.DataFrame, title: str) -> str:
    text: str = shown.rename_axis(index=None, columns=title).to_string(
        float_format="{:,.4g}".format, na_rep="-"
    )
    return text


def _records(frame: pd.DataFrame) -> Any:
    return json.loads(frame.reset_index().to_json(orient="records"))
