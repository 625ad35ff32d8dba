"""Newton-Schulz orthogonalization of matrices: tensors in, tensors out, no groups.

Two iterations that differ in rounding only (``iteration`` says which a matrix gets): the standard
one of arXiv 2502.16982 eq. 2-3 and https://kellerjordan.github.io/posts/muon, and the Gram one,
both started from X = U/‖U‖. The Gram one's error is at most twice the standard one's in 16 bits and
8 times in fp32, as ``coefficients.Restarts`` was found. The order of operations is part of the
definition, since bf16 shows every other order; what a product rounds to is in ``products``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_muon.coefficients import Triple
from megatron_muon.config import MuonConfig
from megatron_muon.iteration import Segments, schedule_of, segments, takes_gram
from megatron_muon.products import (
    Products,
    fp32_is_fp32,
    plan_device,
    products_on,
    travel_dtype,
)


def orthogonalize(matrix: Tensor, config: MuonConfig, moves: Tensor | None = None) -> Tensor:
    """The direction of a matrix: all its singular values brought near 1.

    Args:
        matrix: ``(rows, cols)``, any floating dtype. Any scale: it is normalised in fp32, by its
            largest entry first, so nothing over- or underflows. Zero gives zero.
        config: the settings whose names begin with ``ns_`` are read.
        moves: a bool scalar on the matrix's device; where it is False the direction is zero.

    Returns:
        ``(rows, cols)`` in ``products.travel_dtype``.

    Raises:
        ValueError: ``matrix`` is not 2-D.
    """
    if matrix.dim() != 2:
        raise ValueError(f"a matrix has 2 dims, got shape {tuple(matrix.shape)}")
    tall = matrix.size(0) > matrix.size(1)
    x = _iterated(_entered(matrix, moves, config), config)
    return x.mT if tall else x


def orthogonalize_at_once(
    matrices: Sequence[Tensor] | Tensor,
    config: MuonConfig,
    moves: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """The directions of matrices of one shape, each product one of a batch.

    A batch's products may round otherwise than those of one matrix; of one it is ``orthogonalize``.

    Args:
        matrices: each ``(rows, cols)``, on one device.
        config: as there.
        moves: of each, as there; None: all do.

    Returns:
        Each ``(rows, cols)`` in ``products.travel_dtype``.

    Raises:
        ValueError: they are not 2-D or not of one shape.
    """
    moves = [None] * len(matrices) if moves is None else moves
    if len(matrices) == 1:
        return [orthogonalize(matrices[0], config, moves[0])]
    shapes = {tuple(matrix.shape) for matrix in matrices}
    if len(shapes) != 1 or matrices[0].dim() != 2:
        raise ValueError(f"a batch is of 2-D matrices of one shape, got {sorted(shapes)}")
    entered = [_entered(*each, config) for each in zip(matrices, moves, strict=True)]
    x = _iterated(torch.stack(entered), config)
    tall = matrices[0].size(0) > matrices[0].size(1)
    return [direction.mT if tall else direction for direction in x]


def at_once_on(device: torch.device, config: MuonConfig) -> int:
    """How many matrices of one shape go through ``orthogonalize_at_once`` together, at most.

    A CPU takes one at a time, and so does torch's deterministic mode: which matrices are at one
    home in one round depends on the layout.
    """
    if device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return 1
    return config.ns_batch


def _entered(matrix: Tensor, moves: Tensor | None, config: MuonConfig) -> Tensor:
    """A matrix as products take it: the short side first, normalised, rounded."""
    x = matrix.mT if matrix.size(0) > matrix.size(1) else matrix
    x = x.reshape(-1).view(x.shape)  # row-major, with a row's own strides where there is but one
    return products_on(matrix.device, config.ns_dtype).enter(normalize(x, moves))


def _iterated(x: Tensor, config: MuonConfig) -> Tensor:
    products, device = products_on(x.device, config.ns_dtype), plan_device(x.device)
    with fp32_is_fp32(x.device):
        if takes_gram(x.size(-2), x.size(-1), config, device):
            x = gram_iteration(x, segments(config, device), products)
        else:
            x = standard_iteration(x, schedule_of(config), products)
    return x.to(travel_dtype(config))


def normalize(x: Tensor, moves: Tensor | None = None) -> Tensor:
    """A new fp32 tensor: ``x`` divided by its Frobenius norm; zero stays zero.

    Where ``moves`` is False it is zero, by a division that is made in any case.

    The largest entry is divided out first: squares of entries then neither over- nor underflow, the
    norm is at least 1, and no epsilon is needed that small gradients could fall under.
    """
    x = x.to(torch.float32, copy=True)
    smallest, largest = torch.aminmax(x)
    largest = torch.maximum(-smallest, largest)
    x.div_(torch.where(largest == 0, torch.ones_like(largest), largest))
    norm: Tensor = torch.linalg.vector_norm(x).clamp_min(1.0)
    if moves is not None:
        norm = torch.where(moves, norm, torch.inf)
    return x.div_(norm)


def standard_iteration(x: Tensor, steps: tuple[Triple, ...], products: Products) -> Tensor:
    """Each step: A = XXᵀ, B = bA + cA², X ← aX + BX, every one of them rounded.

    On a CPU no panels: it is what others are compared with, product by product.

    Args:
        x: ``(m, n)`` with m <= n, from ``products.enter``; or ``(k, m, n)``, a batch.
        steps: (a, b, c) of each.
        products: of x's device.
    """
    for a, b, c in steps:
        gram = products.rounded(products.symmetric(x, x.mT, in_panels=False))
        if c == 0:
            x = products.rounded(products.product(gram, x, x, beta=a, alpha=b))
            continue
        square = products.symmetric(gram, gram, gram, beta=b, alpha=c, in_panels=False)
        polynomial = products.rounded(square)
        x = products.rounded(products.product(polynomial, x, x, beta=a))
    return x


def gram_iteration(x: Tensor, parts: Segments, products: Products) -> Tensor:
    """The same polynomials of the short side's square, then one product with X a segment.

    X is rounded as in the standard iteration, the square matrices to ``products.squares``.

    Args:
        x: ``(m, n)`` with m <= n, from ``products.enter``; or ``(k, m, n)``, a batch.
        parts: (a, b, c) of each step, in the segments between restarts.
        products: of x's device.
    """
    for part in parts:
        factor = _factor(products.squared(products.symmetric(x, x.mT)), part, products)
        x = products.rounded(products.product(factor, x))
    return x


def _factor(gram: Tensor, steps: tuple[Triple, ...], products: Products) -> Tensor:
    """Q of one segment: QX is what ``steps`` make of X, given R = XXᵀ; as R, ``(m, m)`` or many."""

    def plus(linear: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
        made = products.symmetric(left, right, linear, beta=beta, alpha=alpha)
        return products.squared(made)

    factor: Tensor | None = None
    for step, (a, b, c) in enumerate(steps):
        # Z = αP; where c is 0 the square is not made, and b is taken into the products.
        alpha, p = (b, gram) if c == 0 else (1.0, plus(gram, gram, gram, b, c))
        if factor is None:
            factor = products.squared(p * alpha)
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            factor = products.squared(factor)
        else:
            factor = plus(factor, factor, p, a, alpha)
        if step < len(steps) - 1:  # R ← (a + Z)R(a + Z)
            half = plus(gram, gram, p, a, alpha)
            gram = plus(half, p, half, a, alpha)
    assert factor is not None  # a segment has a step
    return factor
