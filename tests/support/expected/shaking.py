"""How far results of other roundings may be from the oracle's: trials with shaken roundings."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8}
TRIALS = 3


def shaken(unit: float, generator: torch.Generator, value: Tensor) -> Tensor:
    """Move every element by ± ``unit``, relative; a symmetric matrix stays symmetric, as products
    X Xᵀ do when they are rounded."""
    sign = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.float64) * 2 - 1
    if value.ndim == 2 and value.shape[0] == value.shape[1] and torch.equal(value, value.T):
        sign = sign.triu() + sign.triu(1).T
    return value * (1 + unit * sign)


def shaken_product(generator: torch.Generator, x: Tensor, y: Tensor) -> Tensor:
    """x @ y with the error of an fp32 accumulation."""
    bound = UNIT["fp32"] * x.norm(dim=1, keepdim=True) * y.norm(dim=0, keepdim=True)
    exact = x @ y
    exact = (exact + exact.T) / 2 if y.data_ptr() == x.data_ptr() else exact
    return exact + (shaken(1.0, generator, torch.ones_like(exact)) - 1) * bound


def sizes(deviation: Tensor) -> tuple[float, float]:
    return float(deviation.norm()), float(deviation.abs().max())
