"""Rules of one's own, as users write them; a name here is ``support.runs.own_rules:NAME``
there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_muon import OwnRule
from megatron_muon.settings.coefficients import schedule

HERE = "support.runs.own_rules"
STEPS = schedule("polar_express", 5)


def polar_express(x: Tensor) -> Tensor:
    """Polar Express (arXiv 2505.16932) of ``(..., rows, cols)``."""
    is_tall = x.size(-2) > x.size(-1)
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-30)
    for a, b, c in STEPS:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


def polar_grad(x: Tensor) -> Tensor:
    """PolarGrad (arXiv 2505.21799): the nuclear norm times the polar factor."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return s.sum() * (u @ v)


def rms_of_host(x: Tensor) -> Tensor:
    """A matrix over its root mean square, which the host reads."""
    rms = float(x.square().mean().sqrt())
    return x / rms if rms else x


def _broken(x: Tensor) -> Tensor:
    raise ZeroDivisionError("no such direction")


def _exits(x: Tensor) -> Tensor:
    raise SystemExit(0)


def by_autograd(x: Tensor) -> Tensor:
    """Near-orthogonal factors by one step down the gradient of ‖XXᵀ - 1‖²."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad((x @ x.mT).square().sum(), x)
    return x.detach() - slope


def fails_if_wide(x: Tensor) -> Tensor:
    """It does on shapes of a model only."""
    if x.size(-1) > 48:
        raise ValueError("too wide")
    return polar_express(x)


def mixes(x: Tensor) -> Tensor:
    """It looks at how many tall matrices a batch has, which the layout decides."""
    is_tall = x.size(-2) > x.size(-1)
    return polar_express(x) * (1.0 + (is_tall and len(x) > 2))


one_by_one = OwnRule(polar_express, takes="matrix")
polar = OwnRule(polar_grad, "matrix", reads_host=True, scale=lambda rows, cols: 0.01)
reading = OwnRule(rms_of_host, takes="matrix", reads_host=True)
# What each is refused for.
UNSOUND: dict[str, tuple[Any, str]] = {
    "shape": (lambda x: x.mT, r"takes \(2, 32, 48\) .* returns \(2, 48, 32\) "),
    "dtype": (lambda x: x.half(), "returns .* torch.float16"),
    "None": (lambda x: None, "returns None"),
    "zero": (lambda x: x / x.norm(dim=(1, 2), keepdim=True), "returns NaN or Inf"),
    "raises": (_broken, "ZeroDivisionError: no such direction"),
    "exits": (_exits, r"RuntimeError: it calls sys.exit\(0\)"),
    "autograd": (by_autograd, r"steps run without grad mode: .*enable_grad\(\)"),
    "scale": (OwnRule(polar_express, scale=lambda rows, cols: 0.0), "its scale of"),
    "class": (dict, "dict is no megatron_muon.runtime.rule.Rule"),
}
for _name, (_rule, _) in UNSOUND.items():
    globals()[f"bad_{_name}"] = _rule
