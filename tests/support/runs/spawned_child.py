"""What a process that a rank has spawned sees."""

from __future__ import annotations

import sys

import torch


def seen() -> tuple[int, str, bool]:
    """Devices, where a tensor for a GPU is, and whether Megatron is imported."""
    device = torch.zeros(1, device="cuda").device.type
    return torch.cuda.device_count(), device, "megatron.core" in sys.modules
