"""The bar chart of ``megatron-muon bench step``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_muon.lab.charts import new_figure


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw each row's median step with its range, and Newton-Schulz and the exchange inside it.

    Args:
        result: result of ``step.table.as_json``.
        path: path of the file; see ``charts.require_chart``.

    Raises:
        OSError: the file cannot be written.
    """
    rows = result["rows"]
    places = range(len(rows))
    steps = [row["step_ms"] for row in rows]
    medians = [step["median"] for step in steps]
    ranges = [
        [step["median"] - step["min"] for step in steps],
        [step["max"] - step["median"] for step in steps],
    ]
    figure = new_figure(8, 1.2 + 0.6 * len(rows))
    axes = figure.add_subplot()
    axes.barh(places, medians, xerr=ranges, color="#c8c8c8", label="step, range over rounds")
    axes.barh(
        [place - 0.14 for place in places],
        [row["newton_schulz_ms"] for row in rows],
        color="#3b6ea5",
        label="Newton-Schulz, busiest rank",
        height=0.25,
    )
    axes.barh(
        [place + 0.14 for place in places],
        [row["exchange_ms"] for row in rows],
        color="#d07a2d",
        label="exchange, busiest rank",
        height=0.25,
    )
    axes.set_yticks(list(places), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    topology = " ".join(
        f"{name.upper()}{size}" for name, size in result["topology"].items() if size > 1
    )
    axes.set_title(f"One optimizer step, {topology or 'one rank'}")
    axes.legend(loc="best")
    figure.savefig(path)
