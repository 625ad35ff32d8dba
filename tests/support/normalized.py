"""A matrix over its Frobenius norm, as it enters Newton-Schulz on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_muon.orthogonalize.normalization import normalize_


def normalize(x: Tensor) -> Tensor:
    """A new fp32 matrix; zero stays zero."""
    made = x.to(torch.float32, copy=True)
    normalize_(made[None])
    return made
