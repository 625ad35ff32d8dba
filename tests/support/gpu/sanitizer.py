"""Torch's CUDA sanitizer over steps of Megatron's optimizer, and the virtual GPU's own
check.

The sanitizer sees operations of torch. It does not see races of NCCL: the schemas of
send and receive have no alias information, so it knows no access of theirs. The virtual
GPU sees them.
"""

from __future__ import annotations

from typing import Any

import torch

from support.gpu.model import built_on_rank, flags_of, row_of
from support.gpu.predicted import report
from support.gpu.settings import Settings
from support.virtual_gpu.step import closed, virtual_gpu

_STEPS = 2
_ELEMENTS = 1 << 24


def under_sanitizer(settings: Settings) -> tuple[str, str]:
    """On a rank: the sanitizer's errors of two steps, and of a planted race; empty for
    none.
    """
    from torch.cuda import _sanitizer

    device = torch.device("cuda", torch.cuda.current_device())
    _sanitizer.enable_cuda_sanitizer()
    built = built_on_rank(settings)
    try:
        for _ in range(_STEPS):
            step(built.chunks, built.optimizer)
    except _sanitizer.CUDASanitizerErrors as errors:
        return " ".join(str(errors).split())[:2000], "not tried"
    try:
        plant(device)
    except _sanitizer.CUDASanitizerErrors as errors:
        return "", " ".join(str(errors).split())[:200]
    return "", ""


@torch.no_grad()
def step(chunks: list[Any], optimizer: Any) -> None:
    """One step on gradients of 0.01, reduced as in a run."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
        for param in chunk.parameters():
            param.main_grad.fill_(0.01)
        chunk.finish_grad_sync()
    optimizer.step()
    torch.cuda.synchronize()


def plant(device: torch.device) -> None:
    """Write a tensor on two streams that nothing orders."""
    tensor = torch.zeros(_ELEMENTS, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor.mul_(2.0)
    torch.cuda.synchronize()


def on_virtual_gpu(settings: Settings) -> list[tuple[str, str]]:
    """The same of each rank, by the virtual GPU's record of streams."""
    flags = flags_of(settings, tiny=True)
    config = row_of("muon-contiguous").config
    with virtual_gpu() as gpu, torch.no_grad():
        plant(torch.device("cuda"))
        planted = "; ".join(str(race) for race in closed(0, gpu).races)
    reports = [report(flags, config, rank) for rank in range(settings.ranks)]
    return [("; ".join((*each.races, *each.early_frees)), planted) for each in reports]
