"""Cases that log, and what they log."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.runs.cases import Case


def watched(case: Case, path: Path, interval: int = 1) -> Case:
    """The case with a logging step every ``interval`` steps."""
    settings = (("log_interval", interval), ("log_file", str(path)))
    return replace(case, muon=(*case.muon, *settings))


def records(path: Path) -> list[Any]:
    """What a run has logged."""
    return [json.loads(line) for line in path.read_text().splitlines()]
