"""torch's operation of the symmetric product whose kernel is in
``symmetric_kernels``.

It is imported only where ``--muon-symmetric-products triton`` asks for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_muon.orthogonalize.triton_operations import define, launching_beside


def symmetric_product(
    left: Tensor,
    right: Tensor,
    linear: Tensor | None,
    beta: float,
    alpha: float,
    out: Tensor | None,
) -> Tensor:
    """A ``matmul.SymmetricKernel``; see ``symmetric_kernels.launch_symmetric``."""
    if out is None:
        out = left.new_empty((*left.shape[:-1], left.size(-2)))
    torch.ops.megatron_muon.symmetric(left, right, linear, beta, alpha, out)
    return out


def _symmetric(
    left: Tensor,
    right: Tensor,
    linear: Tensor | None,
    beta: float,
    alpha: float,
    out: Tensor,
) -> None:
    from megatron_muon.orthogonalize.symmetric_kernels import launch_symmetric

    with launching_beside(out):
        launch_symmetric(left, right, linear, out, beta=beta, alpha=alpha)


define(
    "symmetric(Tensor left, Tensor right, Tensor? linear, float beta, float alpha, "
    "Tensor(a!) out) -> ()",
    _symmetric,
)
