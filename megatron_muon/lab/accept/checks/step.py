"""``bench step``: Muon's step beside AdamW's, the paper's and Megatron's own Muon."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_muon.lab.accept.checks.model import arguments
from megatron_muon.lab.accept.outcome import Figure, Finding
from megatron_muon.lab.accept.settings import Settings

_ROUNDS = {"cpu": "2", "cuda": "9"}


def run(settings: Settings) -> list[Finding]:
    """One call of the command, over NCCL with GPUs and over gloo without."""
    from megatron_muon.lab.bench.step.command import main

    if settings.device == "virtual":
        return [Finding("bench step", "not run", settings.why_no_gpu)]
    with tempfile.TemporaryDirectory(prefix="megatron_muon") as folder:
        file = Path(folder, "step.json")
        rounds = ("--rounds", _ROUNDS[settings.device])
        status = main([*arguments(settings), *rounds, "--minutes", "4", "--json", str(file)])
        if not file.exists():
            raise RuntimeError(f"bench step ended with status {status}; see the output")
        result: dict[str, Any] = json.loads(file.read_text())
    return parts(status, result)


def parts(status: int, result: dict[str, Any]) -> list[Finding]:
    """A part for the weights, and one for the times."""
    name = "rows of Muon end a step with the same bits"
    backend = result["run"]["backend"]
    made = [
        Finding(name, "ok", f"over {backend}")
        if status == 0
        else Finding(name, "FAILED", "they end it with different weights")
    ]
    return [*made, Finding("times", "ok", f"over {backend}", tuple(_figures(result)))]


def _figures(result: dict[str, Any]) -> list[Figure]:
    return [
        Figure(f"optimizer step: {row['name']}", "ms", None, row["step_ms"]["median"])
        for row in result["rows"]
    ]
