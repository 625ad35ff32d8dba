"""Commands of the package on the device of the settings, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

from support.benching import environment
from support.gpu.settings import Settings


def ended(settings: Settings, *words: str) -> subprocess.CompletedProcess[str]:
    """``megatron-muon WORDS``; without GPUs where the settings say so."""
    hidden = {} if settings.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "megatron_muon", *words],
        env=environment() | hidden,
        capture_output=True,
        text=True,
    )
