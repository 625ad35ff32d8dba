"""How far results of other roundings may be from the oracle's: trials with shaken
roundings.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from support.expected.oracle import newton_schulz

UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8}
TRIALS = 3


def shaken(unit: float, generator: torch.Generator, value: Tensor) -> Tensor:
    """Move every element by ± ``unit``, relative; a symmetric matrix stays symmetric,
    as products X Xᵀ do when they are rounded.
    """
    square = value.ndim == 2 and value.shape[0] == value.shape[1]
    sign = _signs(generator, value, square and torch.equal(value, value.T))
    return sign.mul_(unit).add_(1).mul_(value)


def _signs(generator: torch.Generator, like: Tensor, symmetric: bool) -> Tensor:
    """1 and -1 by chance. In place, as it is called 280,000 times in
    ``test_oracle``.
    """
    sign = like.new_empty(like.shape, dtype=torch.float64).random_(
        0, 2, generator=generator
    )
    sign = sign.mul_(2).sub_(1)
    return sign.triu().add_(sign.triu(1).T) if symmetric else sign


def shaken_product(generator: torch.Generator, x: Tensor, y: Tensor) -> Tensor:
    """x @ y with the error of an fp32 accumulation."""
    bound = UNIT["fp32"] * x.norm(dim=1, keepdim=True) * y.norm(dim=0, keepdim=True)
    exact = x @ y
    exact = (exact + exact.T) / 2 if y.data_ptr() == x.data_ptr() else exact
    sign = _signs(generator, exact, exact.shape[0] == exact.shape[1])
    return sign.mul_(bound).add_(exact)


def moved_norm(x: Tensor, way: int) -> Tensor:
    """‖x‖ with the error of a sum in fp32: see ``oracle_cases``."""
    roundings = 2.5 + math.sqrt(x.numel() / 3) / 8
    return x.norm() * (1 + way * roundings * UNIT["fp32"])


def all_shaken(ns_dtype: str, seed: int) -> dict[str, Any]:
    """Fields of an oracle that shake each of its roundings, by ``ns_dtype`` in
    Newton-Schulz.
    """
    generator = torch.Generator().manual_seed(seed)
    inside: dict[str, Any] = {"rounded": partial(shaken, UNIT[ns_dtype], generator)}
    inside["product"] = partial(shaken_product, generator)
    inside["norm"] = moved_norm
    return {
        "orthogonalize": partial(newton_schulz, **inside),
        "rounded": partial(shaken, UNIT["fp32"], generator),
        "norm": moved_norm,
    }


def sizes(deviation: Tensor) -> tuple[float, float]:
    return float(deviation.norm()), float(deviation.abs().max())
