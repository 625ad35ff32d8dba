"""Plain torch for the kernels of state-space layers, which run on GPUs only, by
definition.

``install`` puts modules of their names in the place of mamba_ssm (Mamba-2's scan, a
gated norm) and of flash-linear-attention (the gated delta rule, a convolution, an l2
norm), with what a training step of Megatron calls. Sources: arXiv 2405.21060, equations
2 and 16; 2412.06464, equation 10.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def install() -> None:
    """Megatron, imported after this, finds these functions where it looks for the
    packages'.
    """
    for name, made in {
        "mamba_ssm.ops.triton.ssd_combined": [
            mamba_chunk_scan_combined,
            mamba_split_conv1d_scan_combined,
        ],
        "mamba_ssm.ops.triton.layernorm_gated": [RMSNorm],
        "fla.modules.l2norm": [l2norm, l2_norm],
        "fla.modules.convolution": [causal_conv1d],
        "fla.ops.gated_delta_rule": [chunk_gated_delta_rule],
        "fla.ops.gdn2.chunk": [chunk_gdn2],
        "fla.ops.gated_delta_product": [chunk_gated_delta_product],
        "causal_conv1d": [],  # whose version is asked; Megatron has torch in its place
    }.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            module = sys.modules.setdefault(path, ModuleType(path))
            module.__dict__.setdefault("__path__", [])
            module.__dict__.setdefault("__version__", "2.2.5")
        module.__dict__.update({each.__name__: each for each in made})


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    **options: Any,
) -> Tensor:
    """h_t = exp(A dt_t) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t, all tokens at
    once.

    x: (batch, tokens, heads, head size); dt: (batch, tokens, heads); A, D: (heads); B,
    C: (batch,
    tokens, groups, state size).
    """
    D, z, dt_bias = (options.pop(name, None) for name in ("D", "z", "dt_bias"))
    dt_softplus = options.pop("dt_softplus", False)
    _require_none(options)
    dt = dt.float() + (0 if dt_bias is None else dt_bias)
    dt = F.softplus(dt) if dt_softplus else dt
    repeats = x.shape[2] // B.shape[2]
    keys, queries = (each.float().repeat_interleave(repeats, dim=2) for each in (B, C))
    passed = (dt * A).cumsum(dim=1)
    decay = passed[:, :, None] - passed[:, None]  # (batch, to, from, heads)
    later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()[None, :, :, None]
    weights = torch.einsum("bthn,bshn->btsh", queries, keys)
    weights = weights * decay.masked_fill(later, -torch.inf).exp() * dt[:, None]
    y = torch.einsum("btsh,bshp->bthp", weights, x.float())
    if D is not None:
        y = y + D.float()[:, None] * x
    y = y if z is None else y * F.silu(z.float())
    return y.to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    *weights: Tensor,
    D: Tensor,
    chunk_size: int,
    activation: str,
    **options: Any,
) -> Tensor:
    """Of what in_proj makes: z, x, B, C, dt side by side."""
    conv1d_weight, conv1d_bias, dt_bias, A = weights
    headdim, ngroups, _ = (
        options.pop(x) for x in ("headdim", "ngroups", "norm_before_gate")
    )
    _require_none(options)
    heads = len(A)
    inner = len(A) * headdim
    states = (zxbcdt.shape[-1] - 2 * inner - heads) // 2
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * states, heads], dim=-1)
    xbc, _ = causal_conv1d(xbc, conv1d_weight, conv1d_bias, activation)
    x, *bc = xbc.split([inner, states, states], dim=-1)
    x, z = (each.unflatten(-1, (heads, headdim)) for each in (x, z))
    B, C = (each.unflatten(-1, (ngroups, -1)) for each in bc)
    y = mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D=D, z=z, dt_bias=dt_bias, dt_softplus=True
    )
    return y.flatten(2)


class RMSNorm(torch.nn.Module):
    """Of the groups of a row, gated before."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        **made: Any,
    ) -> None:
        super().__init__()
        made.pop("norm_before_gate", True)
        self.eps, self.group_size = eps, group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **made))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        gated = x.float() if z is None else x.float() * F.silu(z.float())
        groups = gated.unflatten(-1, (-1, self.group_size))
        normal = F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2)
        return (normal * self.weight.float()).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """A convolution of each channel over tokens. x: (batch, tokens, channels)."""
    _require_none(options)
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    y = F.conv1d(padded, weight[:, None], bias, groups=len(weight)).transpose(1, 2)
    return (F.silu(y) if activation in ("silu", "swish") else y), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Of each row."""
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps)).to(
        x.dtype
    )


def l2_norm(x: Tensor) -> Tensor:
    """Its later name."""
    return l2norm(x)


def chunk_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """S_t = S_{t-1} diag(exp(g_t)) (I - b_t k_t k_t^T) + w_t v_t k_t^T, o_t = S_t q_t /
    sqrt(n).

    q, k, g, b: (batch, tokens, heads, n); v, w: (batch, tokens, heads, value size). g,
    b and w may have one number a head.
    """
    _require_none(options)
    query, key, value, decay, erased, written = (
        each.float() for each in (q, k, v, g, b, w)
    )
    state = value.new_zeros(*value[:, 0].shape, key.shape[-1])
    outputs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t].exp()[..., None, :]
        seen = (state @ (erased * key)[:, t][..., None])[..., 0]
        change = (written * value)[:, t] - seen
        state = state + change[..., None] * key[:, t][..., None, :]
        outputs.append((state @ query[:, t][..., None])[..., 0] * q.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1).to(v.dtype), None


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """The same with one decay and one rate a head. g, beta: (batch, tokens, heads)."""
    rate = beta[..., None]
    return chunk_gdn2(q, k, v, g[..., None], rate, rate, **options)


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    num_householder: int,
    **options: Any,
) -> tuple[Tensor, None]:
    """``num_householder`` delta rules a token: the first decays, the last answers the
    query.

    k, v, beta have the rules side by side as tokens. Source: arXiv 2502.10297, section
    3.
    """
    at_first, at_last = ((0, num_householder - 1), (num_householder - 1, 0))
    query = F.pad(q[:, :, None], (0, 0, 0, 0, *at_last)).flatten(1, 2)
    decay = F.pad(g[:, :, None], (0, 0, *at_first)).flatten(1, 2)
    out, state = chunk_gated_delta_rule(query, k, v, decay, beta, **options)
    return out[:, num_householder - 1 :: num_householder], state


def _require_none(options: dict[str, Any]) -> None:
    """Of what a training step without packed sequences asks for, there is no more."""
    given = {
        name: value for name, value in options.items() if value not in (None, False)
    }
    if given:
        raise NotImplementedError(f"not in this reference: {given}")
