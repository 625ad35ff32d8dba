"""``bench newton-schulz``: its times beside other packages', and its accuracy on the device."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_muon.lab.accept.outcome import Figure, Finding
from megatron_muon.lab.accept.settings import Settings
from megatron_muon.lab.bench.newton_schulz.command import main

_CPU = ("--shapes", "128x512", "--rounds", "3")
_GPU = ("--shapes", "2048x2048", "4096x14336", "--rounds", "9")
_ACCURACY = ("--accuracy", "--coefficients", "simple", "--shapes")


def run(settings: Settings) -> list[Finding]:
    """Two calls of the command."""
    if settings.device == "virtual":
        return [Finding("bench newton-schulz", "not run", settings.why_no_gpu)]
    device = ("--device", settings.device)
    speeds = called([*(_GPU if settings.gpus else _CPU), *device])
    accuracy = called([*_ACCURACY, "512x2048" if settings.gpus else "64x128", *device])
    return [times(speeds), errors(accuracy)]


def called(arguments: list[str]) -> dict[str, Any]:
    """The figures of a call."""
    with tempfile.TemporaryDirectory(prefix="megatron_muon") as folder:
        file = Path(folder, "figures.json")
        status = main([*arguments, "--json", str(file)])
        if status:
            raise RuntimeError(f"bench newton-schulz ended with status {status}")
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures


def times(speeds: dict[str, Any]) -> Finding:
    """A figure for each row: its median."""
    figures = [
        Figure(f"Newton-Schulz of {row['shape']}: {row['name']}", "ms", None, row["ms"]["median"])
        for row in speeds["rows"]
    ]
    names = dict.fromkeys(row["name"] for row in speeds["rows"])
    return Finding(
        "times, beside other packages", "ok", f"rows: {', '.join(names)}", tuple(figures)
    )


def errors(accuracy: dict[str, Any]) -> Finding:
    """Every direction is finite."""
    rows = [row for row in accuracy["rows"] if isinstance(row, dict)]
    refused = [row for row in accuracy["rows"] if isinstance(row, str)]
    bad = [f"{row['dtype']} {row['iteration']} of {row['input']}" for row in rows
           if not row["finite"]]  # fmt: skip
    worst: dict[str, float] = {}
    for row in rows:
        key = f"largest error to float64: {row['dtype']}, {row['iteration']}"
        worst[key] = max(worst.get(key, 0.0), row["error"])
    figures = tuple(Figure(name, "", None, value) for name, value in worst.items())
    if bad or not rows:
        why = f"not finite: {', '.join(bad)}" if bad else f"no row: {'; '.join(refused)}"
        return Finding("accuracy", "FAILED", why, figures)
    inputs = len({row["input"] for row in rows})
    return Finding(
        "accuracy", "ok", f"every direction of {inputs} kinds of input is finite", figures
    )
