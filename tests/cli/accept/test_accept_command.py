"""``megatron-muon accept`` runs every check on a CPU, and what it can on the virtual GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.accept.table import CHECKS
from megatron_muon.lab.bench.step.meter import launched
from support.benching import environment

pytestmark = pytest.mark.timeout(900)


def accepted(folder: Path, device: str) -> tuple[dict[str, Any], str]:
    """A call of the command over every check: outcomes by check, and the report."""
    command = [sys.executable, "-m", "megatron_muon", "accept", "--folder", str(folder)]
    ended = subprocess.run(
        [*command, "--device", device, "--json", str(folder / "copy.json")],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=folder,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    stored = json.loads((folder / "accept.json").read_text())
    assert json.loads((folder / "copy.json").read_text()) == stored
    report = (folder / "accept.md").read_text()
    assert ended.stdout.startswith(report.rstrip())
    assert not list(folder.glob("*.result")) and not list(folder.glob("*.tmp"))
    return {outcome["check"]: outcome for outcome in stored["outcomes"]}, report


def verdicts(outcome: dict[str, Any]) -> dict[str, str]:
    return {part["name"]: part["verdict"] for part in outcome["parts"]}


def test_every_check_runs_on_a_cpu(tmp_path: Path) -> None:
    by_check, report = accepted(tmp_path, "cpu")
    assert list(by_check) == [check.name for check in CHECKS]
    assert {name: outcome["verdict"] for name, outcome in by_check.items()} == {
        "sanitizer": "not run",
        **dict.fromkeys(
            ("doctor", "bits", "cost", "newton-schulz", "step", "training", "checkpoint"), "ok"
        ),
    }
    assert verdicts(by_check["cost"]) == {
        "bytes": "ok",
        **dict.fromkeys(("peak memory", "launches", "time"), "not run"),
    }
    assert all(figure["measured"] > 0 for figure in by_check["cost"]["parts"][0]["figures"])
    assert len(verdicts(by_check["checkpoint"])) == 6
    assert set(verdicts(by_check["checkpoint"]).values()) == {"ok"}
    assert "Not run: sanitizer. Run in part: bits, cost." in report
    assert str(tmp_path) not in report and "site-packages" not in report


def test_the_virtual_gpu_runs_what_it_can(tmp_path: Path) -> None:
    by_check, report = accepted(tmp_path, "virtual")
    ok = {name for name, outcome in by_check.items() if outcome["verdict"] == "ok"}
    assert ok == {"doctor", "sanitizer", "cost"}
    for name, outcome in by_check.items():
        for part in outcome["parts"]:
            assert part["verdict"] != "not run" or "virtual GPU" in part["text"], (name, part)
    assert verdicts(by_check["sanitizer"]) == {
        "torch's CUDA sanitizer": "not run",
        "no race in two steps": "ok",
        "a race that is planted is found": "ok",
    }
    assert verdicts(by_check["cost"])["bytes of the plan"] == "ok"
    assert "launches of Muon and AdamW, most of a rank" in report


class _Event:
    def __init__(self, name: str, device: Any, annotation: bool = False) -> None:
        self._name, self._device, self._annotation = name, device, annotation

    def name(self) -> str:
        return self._name

    def device_type(self) -> Any:
        return self._device

    def is_user_annotation(self) -> bool:
        return self._annotation


def test_launches_are_a_profilers_kernels_and_copies() -> None:
    from torch.autograd import DeviceType

    events = [
        _Event("aten::mm", DeviceType.CPU),
        _Event("ampere_bf16_gemm", DeviceType.CUDA),
        _Event("ncclDevKernel_SendRecv", DeviceType.CUDA),
        _Event("Memcpy DtoD (Device -> Device)", DeviceType.CUDA),
        _Event("Memset (Device)", DeviceType.CUDA),
        _Event("muon/gather", DeviceType.CUDA, annotation=True),
    ]

    class Profiler:
        class kineto_results:
            @staticmethod
            def events() -> list[_Event]:
                return events

    assert launched(Profiler) == {"kernels": 2, "copies": 1, "memsets": 1}
