"""The Gram iteration: polynomials of the short side's square, and X multiplied once a
segment.

``iteration`` has its formulas, its source and the restarts between segments;
``newton_schulz`` says which matrix gets it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_muon.orthogonalize.iteration import squares_outside
from megatron_muon.orthogonalize.matmul import Products
from megatron_muon.orthogonalize.numerics import Segments, Steps


def gram_iteration(
    x: Tensor, parts: Segments, products: Products, spare: Tensor | None = None
) -> Tensor:
    """Apply the same polynomials to the short side's square, and multiply X once per
    segment.

    X is rounded as in the standard iteration, the square matrices to
    ``products.squares``.

    ``x`` is ``(m, n)``, or ``(k, m, n)``, as ``products.enter`` makes it; the result is
    not scaled. Iterates alternate between ``x`` and ``spare``, of its shape. None: each
    has new memory.
    """
    is_tall = x.size(-2) > x.size(-1)
    holds_all = spare is not None and _holds_all_squares(x)
    for number, part in enumerate(parts):
        folded = products.folds(part)
        squares = _Squares.of(x, spare, len(part), folded=folded, holds_all=holds_all)
        products.of_squares().short_square(x, out=squares.gram)
        factor = _factor(squares, part, products.of_squares())
        unscale = products.unscale(is_last=number == len(parts) - 1)
        if holds_all and spare is not None:
            made = _over_factor(factor, x, unscale, products, spare)
        else:
            made = products.times(factor, x, alpha=unscale, is_tall=is_tall, out=spare)
        spare = None if spare is None else x
        x = made
        del squares, factor
    return x


def _holds_all_squares(x: Tensor) -> bool:
    """Whether all squares of a tall matrix fit into the spare one, Q into the rows
    filled last.

    It follows from the shape alone, since bits do. At LLM sizes the memory of a square
    is worth its copy, 0.2 % of the iteration (by bytes over 3 TB/s and flops over 400
    TFLOP/s).
    """
    return x.dim() == 2 and squares_outside(*x.shape) == 0


def _over_factor(
    factor: Tensor, x: Tensor, alpha: float, products: Products, out: Tensor
) -> Tensor:
    """X ← XQ of a tall X, where Q is in the last rows of ``out``.

    The result's last rows are written over the first rows of X, which have been read by
    then, and copied to Q's place at the end.
    """
    first = x.size(0) - x.size(1)  # of the rows in which Q is
    products.times(factor, x[:first], alpha=alpha, is_tall=True, out=out[:first])
    last = x[: x.size(1)]
    products.times(factor, x[first:], alpha=alpha, is_tall=True, out=last)
    out[first:].copy_(last)
    return out


@dataclass(slots=True)
class _Squares:
    """Memory of a segment's square matrices, each ``(m, m)`` or ``(k, m, m)``."""

    gram: Tensor  # R
    # P = bR + cR²; H = a + P where linear terms are folded, and so the first Q
    power: Tensor
    factor: Tensor  # Q
    other: Tensor  # Q's next value, then R(a + Z)

    @classmethod
    def of(
        cls,
        x: Tensor,
        spare: Tensor | None,
        steps: int,
        *,
        folded: bool,
        holds_all: bool,
    ) -> _Squares:
        """As many as fit are in ``spare``, which is free until X ← QX is written to it.

        That product reads Q, so after the last of ``steps`` Q is outside of ``spare``,
        or in its last rows (``_over_factor``): after an even number in ``other``, after
        an odd one where the first step writes it.
        """
        shape = (*x.shape[:-2], min(x.shape[-2:]), min(x.shape[-2:]))
        numel = math.prod(shape)
        free = [] if spare is None else list(torch.split(spare.view(-1), numel))
        inside = [part.view(shape) for part in free[:3] if part.numel() == numel]
        if spare is not None and holds_all:
            inside.insert(0, spare.view(-1)[-numel:].view(shape))
        last, one, two, three = [
            x.new_empty(shape) for _ in range(4 - len(inside))
        ] + inside
        if steps % 2 == 0:
            return cls(gram=one, power=two, factor=three, other=last)
        if folded:
            return cls(gram=one, power=last, factor=two, other=three)
        return cls(gram=one, power=two, factor=last, other=three)


def factor_of(gram: Tensor, steps: Steps, products: Products) -> Tensor:
    """``_factor`` of R, ``(m, m)``, which is overwritten; products round to the
    squares' dtype.
    """
    power, factor, other = (torch.empty_like(gram) for _ in range(3))
    return _factor(_Squares(gram, power, factor, other), steps, products)


def _factor(squares: _Squares, steps: Steps, products: Products) -> Tensor:
    """Q of one segment, given R = XXᵀ in ``squares.gram``: QX is the result of
    ``steps`` on X.
    """
    if products.folds(steps):
        return _folded_factor(squares, steps, products)

    symmetric = products.symmetric
    gram, factor, other = squares.gram, squares.factor, squares.other
    for step, (a, b, c) in enumerate(steps):
        p, alpha = products.power_sum(gram, b, c, squares.power)  # Z = αP
        if step == 0:
            products.rounded(torch.mul(p, alpha, out=factor))
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            products.rounded(factor)
        else:
            symmetric(factor, p, factor, beta=a, alpha=alpha, out=other)
            factor, other = other, factor
        if step < len(steps) - 1:  # R ← (a + Z)R(a + Z)
            half = symmetric(gram, p, gram, beta=a, alpha=alpha, out=other)
            into = squares.power if p is gram else gram  # where c is 0, P is R
            symmetric(p, half, half, beta=a, alpha=alpha, out=into)
            if into is not gram:
                squares.power, gram = gram, into
    return factor


def _folded_factor(squares: _Squares, steps: Steps, products: Products) -> Tensor:
    """``_factor`` with the linear terms on the diagonal of H = a + Z: Q ← HQ and R ←
    HRH.

    The first Q is H itself, so that no product copies a linear term but that of Z.
    """
    gram, power, factor, other = (
        squares.gram,
        squares.power,
        squares.factor,
        squares.other,
    )
    for step, (a, b, c) in enumerate(steps):
        products.symmetric(gram, gram, gram, beta=b, alpha=c, out=power)
        power.diagonal(dim1=-2, dim2=-1).add_(a)
        products.rounded(power)
        if step < len(steps) - 1:
            products.symmetric(power, gram, out=other)
            products.symmetric(other, power, out=gram)
        if step == 0:
            factor, power = power, factor
        else:
            products.symmetric(power, factor, out=other)
            factor, other = other, factor
    return factor
