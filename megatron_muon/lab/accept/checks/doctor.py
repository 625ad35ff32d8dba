"""The rows of ``megatron-muon doctor``."""

from __future__ import annotations

import re

from megatron_muon.lab.accept.outcome import Finding
from megatron_muon.lab.accept.settings import Settings
from megatron_muon.lab.doctor.rows import examine

_PATH = re.compile(r" \(/[^)]*\)")  # of this machine, which a report does not need


def run(settings: Settings) -> list[Finding]:
    """A part for each row."""
    return [
        Finding(row.name, "FAILED", f"{row.value}: {row.fault}")
        if row.fault
        else Finding(row.name, "ok", _PATH.sub("", row.value))
        for row in examine(None)
    ]
