"""The settings of tests/gpu, from pytest's flags."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from support.processes import python

Report = Callable[..., None]  # of the fixture ``report``
Check = Callable[[], None]  # of ``needs_gpu``
DeviceName = Literal["cuda", "cpu"]
CPU_RANKS = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """What a result depends on."""

    device: DeviceName  # ``cuda``, or ``cpu`` for ranks over gloo
    ranks: int  # number of ranks, each with a GPU on ``cuda``
    hardware: str = (
        "h100"  # hardware of the predicted times: a preset's name, or a file
    )
    changes: tuple[str, ...] = ()  # ``NAME=VALUE`` for other constants of it

    @property
    def gpus(self) -> bool:
        """Whether ranks have GPUs."""
        return self.device == "cuda"


def settings_of(
    device: DeviceName | None, ranks: int | None, hardware: str, changes: Sequence[str]
) -> Settings:
    """The settings of flags, with this machine's values where a flag is missing. An
    error names a flag that is wrong or does not fit this machine."""
    import torch

    from megatron_muon.lab.pricing.presets import hardware_of
    from megatron_muon.lab.ranks import SHARED

    gpus = torch.cuda.device_count()
    device = device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise ValueError(
            "--device cuda: torch sees no GPU here; leave it out to run on the CPU"
        )
    ranks = ranks or (gpus if device == "cuda" else CPU_RANKS)
    if device == "cuda" and ranks > gpus and os.environ.get(SHARED) != "1":
        raise ValueError(
            f"--ranks {ranks}: each needs a GPU, and torch sees {gpus}; with "
            f"{SHARED}=1 they share"
        )
    if ranks > 1 and ranks % 2:
        raise ValueError(
            f"--ranks {ranks}: give 1 or an even number, which TP and DP divide"
        )
    hardware_of(hardware, changes)
    return Settings(device, ranks, hardware, tuple(changes))


def ended(settings: Settings, *words: str) -> subprocess.CompletedProcess[str]:
    """``megatron-muon WORDS`` in a process of its own; without GPUs where the settings
    say so.
    """
    hidden = {} if settings.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    return python("-m", "megatron_muon", *words, timeout=None, **hidden)
