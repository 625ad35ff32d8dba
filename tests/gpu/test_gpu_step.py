"""A step of Muon beside other optimizers' steps: ``megatron-muon bench step``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_muon.lab.accept.report import STEP
from megatron_muon.lab.accept.results import Figure
from support.gpu.model import arguments
from support.gpu.settings import Report, Settings, ended

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def test_rows_of_muon_end_a_step_with_the_same_bits(
    settings: Settings, report: Report, tmp_path: Path
) -> None:
    """The command ends with 1 where they do not."""
    file = tmp_path / "step.json"
    rounds = ("--rounds", "9" if settings.gpus else "2")
    done = ended(
        settings, "bench", "step", *arguments(settings), *rounds, "--json", str(file)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    report(
        *(
            Figure(STEP + row["name"], "ms", None, row["step_ms"]["median"])
            for row in found["rows"]
        ),
        text=f"over {found['run']['backend']}",
    )
    assert found["run"]["backend"] == ("nccl" if settings.gpus else "gloo")
