"""Newton-Schulz beside other packages' on the device, and its accuracy there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.accept.results import Figure
from support.gpu import bits
from support.gpu.model import on_ranks
from support.gpu.settings import Report, Settings, ended

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


def rows_of(settings: Settings, file: Path, words: str) -> list[Any]:
    command = ["bench", "newton-schulz", *words.split(), "--device", settings.device]
    done = ended(settings, *command, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[Any] = json.loads(file.read_text())["rows"]
    return rows


def test_it_is_timed_beside_other_packages(
    settings: Settings, report: Report, tmp_path: Path
) -> None:
    gpu, cpu = "--shapes 2048x2048 4096x14336 --rounds 9", "--shapes 128x512 --rounds 3"
    rows = rows_of(settings, tmp_path / "times.json", gpu if settings.gpus else cpu)
    names = dict.fromkeys(row["name"] for row in rows)
    report(
        *(
            Figure(f"{row['name']}, {row['shape']}", "ms", None, row["ms"]["median"])
            for row in rows
        ),
        text=f"rows: {', '.join(names)}",
    )
    assert rows


def test_every_direction_is_finite(settings: Settings, report: Report) -> None:
    one = Settings(settings.device, 1)
    job = settings.device, (256, 1024) if settings.gpus else (64, 128)
    (errors,) = on_ranks(one, bits.errors_of_hard_inputs, job, 170.0)
    report(
        *(
            Figure(f"largest error to float64: {name}", "", None, e)
            for name, e in errors.items()
        )
    )
    assert errors and all(map(math.isfinite, errors.values()))
