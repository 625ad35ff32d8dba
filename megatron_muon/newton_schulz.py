"""Newton-Schulz orthogonalization of one matrix: tensors in, tensors out, no groups.

X ← aX + (bA + cA²)X with A = XXᵀ, started from X = U/‖U‖ (arXiv 2502.16982 eq. 2-3;
https://kellerjordan.github.io/posts/muon). The order of operations is part of the definition, since
bf16 shows every other order: each of the three products of a step accumulates in fp32, takes its
linear term in the same pass and rounds once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_muon.config import MuonConfig, NsDtype

_TORCH_DTYPE: dict[NsDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def torch_dtype(ns_dtype: NsDtype) -> torch.dtype:
    """The torch dtype that matrices travel and are orthogonalized in."""
    return _TORCH_DTYPE[ns_dtype]


def orthogonalize(matrix: Tensor, config: MuonConfig) -> Tensor:
    """The direction of a matrix: all its singular values brought near 1.

    Args:
        matrix: ``(rows, cols)``, any floating dtype. Any scale: it is normalised in fp32, by its
            largest entry first, so nothing over- or underflows. Zero gives zero.
        config: ``ns_steps``, ``ns_coefficients`` and ``ns_dtype`` are read.

    Returns:
        ``(rows, cols)`` in ``ns_dtype``.

    Raises:
        ValueError: ``matrix`` is not 2-D.
    """
    if matrix.dim() != 2:
        raise ValueError(f"a matrix has 2 dims, got shape {tuple(matrix.shape)}")
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.mT.contiguous() if tall else matrix
    x = normalize(x.float()).to(torch_dtype(config.ns_dtype))
    for _ in range(config.ns_steps):
        x = newton_schulz_step(x, config.ns_coefficients)
    return x.mT if tall else x


def normalize(x: Tensor) -> Tensor:
    """``x`` in fp32 divided by its Frobenius norm; zero stays zero.

    The largest entry is divided out first: squares of entries then neither over- nor underflow, the
    norm is at least 1, and no epsilon is needed that small gradients could fall under.
    """
    largest = torch.linalg.vector_norm(x, ord=float("inf"))
    x = x / torch.where(largest > 0, largest, torch.ones_like(largest))
    norm: Tensor = torch.linalg.vector_norm(x).clamp_min(1.0)
    return x / norm


def newton_schulz_step(x: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """One iteration on ``x`` of shape ``(m, n)`` with m <= n."""
    a, b, c = coefficients
    gram = _addmm(None, x, x.mT, beta=0.0, alpha=1.0)
    polynomial = _addmm(gram, gram, gram, beta=b, alpha=c)
    return _addmm(x, polynomial, x, beta=a, alpha=1.0)


def _addmm(
    linear: Tensor | None, left: Tensor, right: Tensor, *, beta: float, alpha: float
) -> Tensor:
    """``beta·linear + alpha·left@right``, accumulated in fp32 and rounded once to left's dtype.

    On CUDA the matmul does that by itself, as accurately as ``torch.backends.cuda.matmul`` lets it
    (TF32 and reduced-precision reductions are the process's choice). On CPU the operands, exact in
    fp32, are multiplied there: torch's bf16 kernels are tens of times slower where the CPU has no
    bf16 instructions, and the result does not depend on whether it has them.
    """
    dtype = left.dtype
    if left.device.type == "cpu" and dtype != torch.float32:
        left, right = left.float(), right.float()
        linear = None if linear is None else linear.float()
    if linear is None:
        return torch.mm(left, right).to(dtype)
    return torch.addmm(linear, left, right, beta=beta, alpha=alpha).to(dtype)
