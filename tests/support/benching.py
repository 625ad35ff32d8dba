"""What tests of ``megatron-muon bench step`` share: a small model, and the command itself."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace

from support import ROOT

SMALL = "--hidden 64 --layers 1 --heads 4 --vocab 512 --seq 16"
OURS = ["muon-contiguous", "muon-bucketed"]


def environment() -> dict[str, str]:
    """In which a command imports what this process does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def command(arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``megatron-muon``."""
    line = [sys.executable, "-m", "megatron_muon", *arguments.split()]
    return subprocess.run(
        line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280
    )


def model_and_ranks(arguments: str) -> Namespace:
    """Megatron's flags of ``SMALL``, as the command reads them."""
    from megatron_muon.lab.bench.step.flags import parsed

    return parsed(f"{SMALL} {arguments}".split())
