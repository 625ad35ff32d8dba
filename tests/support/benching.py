"""Shared by tests of ``megatron-muon bench step``: a small model, and the command
itself.
"""

from __future__ import annotations

import subprocess
from argparse import Namespace
from typing import Any

from support.processes import environment as environment
from support.processes import python

SMALL = "--hidden 64 --layers 1 --heads 4 --vocab 512 --seq 16"
OURS = ["muon-contiguous", "muon-bucketed"]


def command(arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``megatron-muon``."""
    return python("-m", "megatron_muon", *arguments.split())


def model_and_ranks(arguments: str) -> Namespace:
    """Megatron's flags of ``SMALL``, as the command reads them."""
    from megatron_muon.lab.bench.step.flags import parsed

    return parsed(f"{SMALL} {arguments}".split())


def measured(arguments: str, names: list[str]) -> dict[str, Any]:
    """On a rank: what each row costs."""
    from megatron_muon import MuonConfig
    from megatron_muon.lab.bench.step.measure import StepJob, measure
    from megatron_muon.lab.bench.step.rows import rows

    chosen = rows(MuonConfig(), names)
    each = measure(StepJob(model_and_ranks(arguments), tuple(chosen), 1))
    return {row.name: one for row, one in zip(chosen, each, strict=True)}
