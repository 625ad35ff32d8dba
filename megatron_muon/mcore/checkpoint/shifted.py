"""AdamW's state that Megatron saves shifted: where it will, and main parameters that were.

fully_reshardable of Megatron 0.15 to 0.19 cuts parameters out of tensors without padding at places
that count padding (NVIDIA/Megatron-LM pull request 5077). So it shifts the state of all buckets
after a padded one. Muon's state is cut at the right places: see ``sharded``.
"""

from __future__ import annotations

from typing import Any

import torch

FAULT = (
    "fully_reshardable of Megatron 0.15 to 0.19 saves shifted optimizer state where a grad buffer "
    "has several padded buckets (NVIDIA/Megatron-LM pull request 5077)"
)


def will_shift(dist_opt: Any, version: tuple[int, ...]) -> bool:
    """Whether Megatron's fully_reshardable would shift state of this rank's grad buffers.

    Args:
        dist_opt: a DistributedOptimizer without Muon.
        version: the one of megatron-core.
    """
    return (0, 15) <= version < (0, 20) and any(
        bucket.grad_data.numel() > bucket.numel_unpadded
        for buffer in dist_opt.buffers
        for bucket in buffer.buckets[:-1]
    )


def is_elsewheres(main: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether an fp32 main parameter is not that of a weight, which was rounded, at most to fp8."""
    main = main.detach().float()
    apart = torch.linalg.vector_norm(main - weight.detach().float())
    return bool(apart > 0.25 * torch.linalg.vector_norm(main))
