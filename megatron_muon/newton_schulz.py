"""Newton-Schulz orthogonalization of one matrix: tensors in, tensors out, no groups.

Two iterations that differ in rounding only (``iteration`` says which a matrix gets): the standard
one of arXiv 2502.16982 eq. 2-3 and https://kellerjordan.github.io/posts/muon, and the Gram one,
both started from X = U/‖U‖. The order of operations is part of the definition, since bf16 shows
every other order; what a product rounds to is in ``products``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_muon.coefficients import Triple
from megatron_muon.config import MuonConfig
from megatron_muon.iteration import Segments, schedule_of, segments, takes_gram
from megatron_muon.products import Products, plan_device, products_on, travel_dtype


def orthogonalize(matrix: Tensor, config: MuonConfig) -> Tensor:
    """The direction of a matrix: all its singular values brought near 1.

    Args:
        matrix: ``(rows, cols)``, any floating dtype. Any scale: it is normalised in fp32, by its
            largest entry first, so nothing over- or underflows. Zero gives zero.
        config: the settings whose names begin with ``ns_`` are read.

    Returns:
        ``(rows, cols)`` in ``products.travel_dtype``.

    Raises:
        ValueError: ``matrix`` is not 2-D.
    """
    if matrix.dim() != 2:
        raise ValueError(f"a matrix has 2 dims, got shape {tuple(matrix.shape)}")
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.mT if tall else matrix
    x = x.reshape(-1).view(x.shape)  # row-major, with a row's own strides where there is but one
    products = products_on(matrix.device, config.ns_dtype)
    x = products.enter(normalize(x))
    device = plan_device(matrix.device)
    if takes_gram(matrix.size(0), matrix.size(1), config, device):
        x = gram_iteration(x, segments(config, device), products)
    else:
        x = standard_iteration(x, schedule_of(config), products)
    x = x.to(travel_dtype(config))
    return x.mT if tall else x


def normalize(x: Tensor) -> Tensor:
    """A new fp32 tensor: ``x`` divided by its Frobenius norm; zero stays zero.

    The largest entry is divided out first: squares of entries then neither over- nor underflow, the
    norm is at least 1, and no epsilon is needed that small gradients could fall under.
    """
    x = x.to(torch.float32, copy=True)
    smallest, largest = torch.aminmax(x)
    largest = torch.maximum(-smallest, largest)
    x.div_(torch.where(largest == 0, torch.ones_like(largest), largest))
    norm: Tensor = torch.linalg.vector_norm(x).clamp_min(1.0)
    return x.div_(norm)


def standard_iteration(x: Tensor, steps: tuple[Triple, ...], products: Products) -> Tensor:
    """Each step: A = XXᵀ, B = bA + cA², X ← aX + BX, every one of them rounded.

    Args:
        x: ``(m, n)`` with m <= n, from ``products.enter``.
        steps: (a, b, c) of each.
        products: of x's device.
    """
    for a, b, c in steps:
        gram = products.rounded(products.product(x, x.mT))
        if c == 0:
            x = products.rounded(products.product(gram, x, x, beta=a, alpha=b))
            continue
        polynomial = products.rounded(products.product(gram, gram, gram, beta=b, alpha=c))
        x = products.rounded(products.product(polynomial, x, x, beta=a))
    return x


def gram_iteration(x: Tensor, parts: Segments, products: Products) -> Tensor:
    """The same polynomials of the short side's square, then one product with X a segment.

    X is rounded as in the standard iteration, the square matrices to ``products.squares``.

    Args:
        x: ``(m, n)`` with m <= n, from ``products.enter``.
        parts: (a, b, c) of each step, in the segments between restarts.
        products: of x's device.
    """
    for part in parts:
        factor = _factor(products.squared(products.symmetric(x, x.mT)), part, products)
        x = products.rounded(products.product(factor, x))
    return x


def _factor(gram: Tensor, steps: tuple[Triple, ...], products: Products) -> Tensor:
    """Q of one segment, ``(m, m)``: QX is what ``steps`` make of X, given R = XXᵀ."""

    def plus(linear: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
        made = products.symmetric(left, right, linear, beta=beta, alpha=alpha)
        return products.squared(made)

    factor: Tensor | None = None
    for step, (a, b, c) in enumerate(steps):
        # Z = αP; where c is 0 the square is not made, and b is taken into the products.
        alpha, p = (b, gram) if c == 0 else (1.0, plus(gram, gram, gram, b, c))
        if factor is None:
            factor = products.squared(p * alpha)
            factor.diagonal().add_(a)
            factor = products.squared(factor)
        else:
            factor = plus(factor, factor, p, a, alpha)
        if step < len(steps) - 1:  # R ← (a + Z)R(a + Z)
            half = plus(gram, gram, p, a, alpha)
            gram = plus(half, p, half, a, alpha)
    assert factor is not None  # a segment has a step
    return factor
