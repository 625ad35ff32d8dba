"""The rows of ``megatron-muon doctor``."""

from __future__ import annotations

from megatron_muon.bench.accept.outcome import Part
from megatron_muon.bench.accept.settings import Settings
from megatron_muon.cli.doctor_rows import examine


def run(settings: Settings) -> list[Part]:
    """A part for each row."""
    return [
        Part(row.name, "FAILED", f"{row.value}: {row.fault}")
        if row.fault
        else Part(row.name, "ok", row.value)
        for row in examine(None)
        if row.name != "python" and row.value  # whose value is a path of the machine
    ]
