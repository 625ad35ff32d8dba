"""Commands of the package on the device of the settings, in processes of their own."""

from __future__ import annotations

import subprocess

from support.gpu.settings import Settings
from support.processes import python


def ended(settings: Settings, *words: str) -> subprocess.CompletedProcess[str]:
    """``megatron-muon WORDS``; without GPUs where the settings say so."""
    hidden = {} if settings.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    return python("-m", "megatron_muon", *words, timeout=None, **hidden)
