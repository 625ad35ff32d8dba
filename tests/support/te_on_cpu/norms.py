"""LayerNorm and RMSNorm of Transformer Engine, forward and backward, in fp32, rounded once."""

from __future__ import annotations

from typing import Any

import torch

from support.te_on_cpu.products import DTYPES, written

Tensor = torch.Tensor


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, None, Tensor]:
    """The normed input, and what the backward pass needs."""
    wide = x.float()
    rsigma = (wide.square().mean(-1) + eps).rsqrt()
    value = wide * rsigma[..., None] * (weight.float() + float(zero_centered))
    return written(out, value, DTYPES[int(dtype)]), None, rsigma


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The normed input, and what the backward pass needs."""
    wide = x.float()
    mu = wide.mean(-1)
    rsigma = ((wide - mu[..., None]).square().mean(-1) + eps).rsqrt()
    gamma = weight.float() + float(zero_centered)
    value = (wide - mu[..., None]) * rsigma[..., None] * gamma + bias.float()
    return written(out, value, DTYPES[int(dtype)]), mu, rsigma


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of gamma."""
    normed = x.float() * rsigma[..., None]
    wide = dz.float().view_as(normed)
    dy = wide * (weight.float() + float(zero_centered))
    dx = rsigma[..., None] * (dy - normed * (dy * normed).mean(-1, keepdim=True))
    rows = tuple(range(x.dim() - 1))
    return dx.to(x.dtype), (wide * normed).sum(rows).to(weight.dtype)


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, of gamma and of beta."""
    normed = (x.float() - mu[..., None]) * rsigma[..., None]
    wide = dz.float().view_as(normed)
    dy = wide * (weight.float() + float(zero_centered))
    dx = dy - dy.mean(-1, keepdim=True) - normed * (dy * normed).mean(-1, keepdim=True)
    rows = tuple(range(x.dim() - 1))
    dgamma, dbeta = (wide * normed).sum(rows), wide.sum(rows)
    return (dx * rsigma[..., None]).to(x.dtype), dgamma.to(weight.dtype), dbeta.to(weight.dtype)
