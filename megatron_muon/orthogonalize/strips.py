"""Newton-Schulz of a matrix of which several ranks have a strip each: a range of the
long side.

The polynomial of a step is one of the short side's square XXᵀ, which is a sum over
strips. So the ranks add their squares (``Sharing``), make the same polynomial of the
sum, and apply it to their own strips. In the standard iteration that is one sum in each
step, in the Gram iteration one in each segment. Sums are made in the order of strips,
so a result depends on how many there are, and not on the ranks that have them. It
differs from a whole matrix's by rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_muon.orthogonalize.gram import factor_of
from megatron_muon.orthogonalize.iteration import (
    makes_rows,
    square_rows,
    strips_take_gram,
)
from megatron_muon.orthogonalize.matmul import (
    TORCH_DTYPE,
    Products,
    products_on,
    sums_in_fp32,
)
from megatron_muon.orthogonalize.normalization import (
    Soundness,
    largest_of,
    power_of_two,
)
from megatron_muon.orthogonalize.numerics import Numerics, Segments, Steps


class Sharing(Protocol):
    """The homes of a matrix's strips; each of them calls the same methods in the same
    order.

    Each strip has its rows of a square (``iteration.square_rows``), and a home those of
    its strips, one after another.

    Attributes:
        numbers: numbers of the strips that are here.
        count: number of strips.
    """

    numbers: list[int]
    count: int

    def all_numbers(self, mine: Tensor) -> Tensor:
        """``(strips, k)`` in the order of strips, from ``(strips here, k)``, contiguous
        fp32.
        """

    def add(self, squares: Sequence[Tensor]) -> Tensor:
        """This home's rows of the sum of all strips' squares, from the squares of those
        that are here, each ``(m, m)`` and contiguous.

        They are added in fp32 in the order of strips, and rounded to the dtype of
        squares.
        """

    def together(self, rows: Tensor) -> Tensor:
        """``(m, m)`` from each home's rows, ``(rows here, m)``."""


def orthogonalize_strips(
    strips: Sequence[Tensor],
    whole: tuple[int, int],
    moves: Tensor,
    numerics: Numerics,
    sharing: Sharing,
    soundness: Soundness | None = None,
) -> None:
    """Replace the strips that are here by those of the matrix's direction, in place.

    Args:
        strips: each a view whose first dim is the matrix's rows or a range of them, and
            whose other dims are its columns or a range of them, in
            ``Numerics.travels``. How it lies in memory changes no bit. Its memory takes
            the directions, in ``Numerics.dtype``.
        whole: rows and columns of the matrix.
        moves: ``(len(strips),)`` bool: whether a strip has a gradient. Without any, the
            direction is zero.
        soundness: takes the matrix's numbers for each of these strips, the same at all
            homes.
    """
    products = products_on(strips[0].device, numerics)
    is_tall = whole[0] >= whole[1]  # strips of a square one are ranges of rows, too
    entered, norm = _entered(strips, moves, products, sharing)
    # (m, n) with the short side first; a tall strip is a view, and stays as it is in
    # memory
    x = [one.mT if is_tall else one for one in entered]
    del entered
    by_rows = makes_rows(*whole, sharing.count, numerics)
    with sums_in_fp32(strips[0].device):
        if strips_take_gram(*whole, sharing.count, numerics):
            _gram(x, numerics.segments, products, sharing, by_rows=by_rows)
        else:
            _standard(x, numerics.steps, products.plain(), sharing, by_rows=by_rows)
    # every home's line shows what is wrong with Q, and only its own what its product
    # overflows
    lines = torch.stack([largest_of(one[:, 0]) for one in x]).float()
    line = sharing.all_numbers(lines[:, None]).amax()
    if soundness is not None:
        soundness.norms.append(norm.expand(len(strips)))
        soundness.lines.append(line.expand(len(strips)))
    for strip, direction in zip(strips, x, strict=True):
        made = (direction.mT if is_tall else direction).reshape(strip.shape)
        strip.view(TORCH_DTYPE[numerics.dtype]).copy_(made)


def _entered(
    strips: Sequence[Tensor], moves: Tensor, products: Products, sharing: Sharing
) -> tuple[list[Tensor], Tensor]:
    """New ``(rows, columns)`` of the strips, divided by the whole matrix's norm, for
    products.

    With them comes the norm, which is NaN if an entry is not finite.

    The power of two below a strip's largest entry is divided out first, which rounds
    nothing; the norm is in units of the largest strip's.
    """
    largest = [torch.linalg.vector_norm(one, math.inf).float() for one in strips]
    powers = power_of_two(torch.stack(largest))
    # a sum goes by the order of elements in memory: rows, and the matrix's columns in
    # them
    made = [
        one.flatten(1).to(torch.float32, copy=True).div_(power)
        for one, power in zip(strips, powers, strict=True)
    ]
    squares = torch.stack([torch.linalg.vector_norm(one).square() for one in made])
    here = torch.stack([powers, squares, moves.float()], dim=1)
    all_powers, all_squares, moved = sharing.all_numbers(here).unbind(dim=1)
    unit = all_powers.amax()
    norm = (all_squares * (all_powers / unit).square()).sum().sqrt()
    has_direction = (norm > 0) & (moved.sum() > 0)
    by = torch.where(has_direction, norm, math.inf) / products.scale
    for one, power in zip(made, powers, strict=True):
        one.div_(by * (unit / power))
    return [products.enter(one) for one in made], norm


def _gram(
    x: list[Tensor],
    parts: Segments,
    products: Products,
    sharing: Sharing,
    *,
    by_rows: bool,
) -> None:
    """The Gram iteration (``gram.gram_iteration``), which replaces the strips of
    ``x``.
    """
    of_squares = products.of_squares()
    shared = _ByRows(x[0].size(0), of_squares, sharing)
    for number, part in enumerate(parts):
        unscale = products.unscale(is_last=number == len(parts) - 1)
        if by_rows:
            q = _factor_by_rows([shared.square(x)], part, shared)
            _apply(q, x, products, alpha=unscale)
            del q
            continue
        factor = factor_of(_whole_square(x, of_squares, sharing), part, of_squares)
        for at, one in enumerate(x):
            x[at] = products.times(factor, one, alpha=unscale)
        del factor, one  # the next sum needs their memory


def _standard(
    x: list[Tensor],
    steps: Steps,
    products: Products,
    sharing: Sharing,
    *,
    by_rows: bool,
) -> None:
    """The standard iteration (``newton_schulz.standard_iteration``); see ``_gram``."""
    shared = _ByRows(x[0].size(0), products, sharing)
    for step, (a, b, c) in enumerate(steps):
        unscale = products.unscale(is_last=step == len(steps) - 1)
        if by_rows:
            p, alpha = shared.square(x), b  # Z = αP
            if c != 0:
                p, alpha = shared.product(p, p, p, beta=b, alpha=c), 1.0
            _apply(p, x, products, beta=a * unscale, alpha=alpha * unscale)
            del p
            continue
        square, alpha = products.power_sum(_whole_square(x, products, sharing), b, c)
        beta = products.fold(square, a * unscale, alpha * unscale)
        for at, one in enumerate(x):
            x[at] = products.times(square, one, beta=beta, alpha=alpha * unscale)
        del square, one


def _whole_square(x: Sequence[Tensor], products: Products, sharing: Sharing) -> Tensor:
    """XXᵀ, ``(m, m)``, the sum of those of all strips."""
    rows = sharing.add([products.square(one) for one in x])
    return sharing.together(products.rounded(rows))


@dataclass(frozen=True, slots=True)
class _Square:
    """A square, ``(m, m)``, of which each strip makes rows."""

    rows: list[Tensor]  # of each strip that is here
    whole: Tensor | None = None  # the rows of all strips; None where it is not needed


class _ByRows:
    """Squares and products of squares of which each strip makes its rows.

    A product's rows follow from the same rows of its left operand.
    """

    def __init__(self, short: int, products: Products, sharing: Sharing) -> None:
        self._products = products
        self._sharing = sharing
        self._spans = [
            square_rows(short, number, sharing.count) for number in sharing.numbers
        ]

    def square(self, x: Sequence[Tensor]) -> _Square:
        """XXᵀ, the sum of those of all strips."""
        rows = self._sharing.add([self._products.square(one) for one in x])
        rows = self._products.rounded(rows)
        sizes = [stop - start for start, stop in self._spans]
        own = list(torch.split_with_sizes(rows, sizes))
        return _Square(own, self._sharing.together(rows))

    def product(
        self,
        left: _Square,
        right: _Square,
        linear: _Square,
        *,
        beta: float,
        alpha: float,
        travels: bool = True,
    ) -> _Square:
        """``beta·linear + alpha·left@right``."""
        assert right.whole is not None
        rows = [
            self._products.product(own, right.whole, added, beta=beta, alpha=alpha)
            for own, added in zip(left.rows, linear.rows, strict=True)
        ]
        return self._together(rows, travels=travels)

    def plus_diagonal(
        self, power: _Square, alpha: float, a: float, *, travels: bool
    ) -> _Square:
        """``a + alpha·power``."""
        rows = []
        for own, (start, _) in zip(power.rows, self._spans, strict=True):
            made = self._products.rounded(torch.mul(own, alpha))
            made.diagonal(start).add_(a)
            rows.append(self._products.rounded(made))
        return self._together(rows, travels=travels)

    def _together(self, rows: list[Tensor], *, travels: bool) -> _Square:
        """A square from its rows at each home."""
        if not travels:
            return _Square(rows)
        own = rows[0] if len(rows) == 1 else torch.cat(rows)
        return _Square(rows, self._sharing.together(own))


def _apply(
    square: _Square,
    x: list[Tensor],
    products: Products,
    *,
    beta: float | None = None,
    alpha: float,
) -> None:
    """X ← ``beta·X + alpha·SX``; beta None: no linear term. S is symmetric but for
    rounding, and its columns make the rows of the result.
    """
    assert square.whole is not None
    for at, one in enumerate(x):
        x[at] = products.times(square.whole.mT, one, beta=beta, alpha=alpha)


def _factor_by_rows(held: list[_Square], steps: Steps, by_rows: _ByRows) -> _Square:
    """``gram.factor_of`` where each strip makes rows of each square.

    Q travels once it is complete. ``held`` is R alone, which is taken out of the list,
    so that its memory returns.
    """
    gram = held.pop()
    factor: _Square | None = None
    for step, (a, b, c) in enumerate(steps):
        is_last = step == len(steps) - 1
        # Z = αP. Where c is 0, the square is not made: P is R, and α is b.
        alpha, power = b, gram
        if c != 0:
            alpha = 1.0
            travels = len(steps) > 1
            power = by_rows.product(gram, gram, gram, beta=b, alpha=c, travels=travels)
        if is_last:
            del gram
        else:  # R ← (a + Z)R(a + Z)
            half = by_rows.product(
                gram, power, gram, beta=a, alpha=alpha, travels=False
            )
            del gram
            gram = by_rows.product(half, power, half, beta=a, alpha=alpha)
            del half
        if factor is None:  # before, Q is 1
            factor = by_rows.plus_diagonal(power, alpha, a, travels=is_last)
        else:
            factor = by_rows.product(
                factor, power, factor, beta=a, alpha=alpha, travels=is_last
            )
        del power
    assert factor is not None
    return factor
