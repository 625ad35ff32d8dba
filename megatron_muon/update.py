"""What happens to a local shard: momentum before the exchange, the update after it.

Every operation here is elementwise and rounds once, so a result does not depend on where a shard
is cut: a fused multiply-add may round differently in a kernel's vector body and in its tail.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_muon.config import MuonConfig


def advance_momentum(
    momentum_buffer: Tensor, grad: Tensor, *, momentum: float, nesterov: bool
) -> Tensor:
    """M ← μM + G in place; returns what is orthogonalized (arXiv 2502.16982, Algorithm 1).

    Args:
        momentum_buffer: ``(n,)`` fp32, updated.
        grad: ``(n,)`` fp32, reduced and clipped.
        momentum: μ.
        nesterov: return G + μM rather than M.

    Returns:
        ``(n,)`` fp32; with ``nesterov`` off it is ``momentum_buffer`` itself.
    """
    momentum_buffer.mul_(momentum).add_(grad)
    return torch.mul(momentum_buffer, momentum).add_(grad) if nesterov else momentum_buffer


def update_scale(rows: int, cols: int, config: MuonConfig) -> float:
    """What a direction is multiplied by, per unit of lr: rms·√max(rows, cols) (eq. 4).

    The other modes are those of ``get_muon_scale_factor`` in NVIDIA's Emerging-Optimizers:
    rms·√(rows/cols) for ``unit_rms_norm``, rms·√max(1, rows/cols) for ``shape_scaling``.

    Args:
        rows, cols: outputs and inputs of the whole matrix, not of a rank's slice.
        config: ``matched_adamw_rms`` and ``scale_mode`` are read. With ``spectral``, the former is
            the root mean square that an update of a full-rank matrix then has.
    """
    squares = {
        "spectral": max(rows, cols),
        "unit_rms_norm": rows / cols,
        "shape_scaling": max(1.0, rows / cols),
    }
    return config.matched_adamw_rms * math.sqrt(squares[config.scale_mode])


def apply_update(param: Tensor, update: Tensor, *, lr: float, weight_decay: float) -> None:
    """W ← (1 - lr·λ)W - update, in place (eq. 4; the decay is decoupled and unscaled).

    Args:
        param: ``(n,)`` fp32 main parameter.
        update: ``(n,)`` fp32, lr and scale already in it.
    """
    if weight_decay != 0.0:
        param.mul_(1.0 - lr * weight_decay)
    param.sub_(update)
