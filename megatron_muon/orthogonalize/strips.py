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

    Attributes:
        numbers: numbers of the strips that are here.
        count: number of strips.
    """

    @property
    def numbers(self) -> Sequence[int]: ...

    @property
    def count(self) -> int: ...

    def all_numbers(self, mine: Tensor) -> Tensor:
        """``(strips, k)`` in the order of strips, from ``(strips here, k)`` fp32."""

    def add(self, squares: Sequence[Tensor]) -> Tensor:
        """The sum of the squares of all strips, from those that are here, each ``(m,
        m)``.

        It is added in fp32 in the order of strips, and rounded to the dtype of squares.
        """

    def together(
        self, rows_here: Sequence[Tensor], places: Sequence[tuple[int, int]]
    ) -> Tensor:
        """A square, ``(m, m)``, from the rows of each strip here.

        Args:
            places: start and stop of every strip's rows (``iteration.square_rows``).
        """


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
    with sums_in_fp32(strips[0].device):
        if strips_take_gram(*whole, sharing.count, numerics):
            by_rows = makes_rows(*whole, sharing.count, numerics)
            _gram(x, numerics.segments, products, sharing, by_rows=by_rows)
        else:
            _standard(x, numerics.steps, products.plain(), sharing)
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

    The power of two below the matrix's largest entry is divided out first, which rounds
    nothing.
    """
    largest = torch.stack(
        [torch.linalg.vector_norm(one, math.inf).float() for one in strips]
    )
    every = sharing.all_numbers(torch.stack([largest, moves.float()], dim=1))
    power = power_of_two(every[:, 0].amax())
    # a sum goes by the order of elements in memory: rows, and the matrix's columns in
    # them
    made = [one.flatten(1).to(torch.float32, copy=True).div_(power) for one in strips]
    squares = torch.stack([torch.linalg.vector_norm(one).square() for one in made])
    norm = sharing.all_numbers(squares[:, None]).sum().sqrt()
    has_direction = (norm > 0) & (every[:, 1].sum() > 0)
    by = torch.where(has_direction, norm, math.inf) / products.scale
    return [products.enter(one.div_(by)) for one in made], norm


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
    for number, part in enumerate(parts):
        unscale = products.unscale(is_last=number == len(parts) - 1)
        gram = [of_squares.rounded(sharing.add([of_squares.square(one) for one in x]))]
        if by_rows:
            factor = _factor_by_rows(gram, part, of_squares, sharing)
        else:
            factor = factor_of(gram.pop(), part, of_squares)
        for at, one in enumerate(x):
            x[at] = products.times(factor, one, alpha=unscale)
        del factor, one  # the next sum needs their memory


def _factor_by_rows(
    held: list[Tensor], steps: Steps, products: Products, sharing: Sharing
) -> Tensor:
    """``gram.factor_of`` where each strip makes rows of each square.

    A product's rows follow from the same rows of its left operand. So Q and what is
    multiplied twice stay in rows until they are the right operand: P in each step, R in
    the next one, Q of X. ``held`` is R alone, which is taken out of the list, so that
    its memory returns.
    """
    gram = held.pop()
    places = [
        square_rows(gram.size(0), number, sharing.count)
        for number in range(sharing.count)
    ]
    spans = [places[number] for number in sharing.numbers]
    own = [gram[start:stop] for start, stop in spans]  # rows of R
    factor: list[Tensor] = []  # rows of Q
    for step, (a, b, c) in enumerate(steps):
        # Z = αP. Where c is 0, the square is not made: P is R, and α is b.
        alpha, power, rows = b, gram, own
        if c != 0:
            rows = [products.product(r, gram, r, beta=b, alpha=c) for r in own]
            alpha, power = 1.0, sharing.together(rows, places)
        if step == 0:
            factor = [
                _plus_diagonal(p, alpha, a, start, products)
                for p, (start, _) in zip(rows, spans, strict=True)
            ]
        else:
            factor = [
                products.product(q, power, q, beta=a, alpha=alpha) for q in factor
            ]
        del rows
        if step < len(steps) - 1:  # R ← (a + Z)R(a + Z)
            own = [products.product(r, power, r, beta=a, alpha=alpha) for r in own]
            own = [
                products.product(half, power, half, beta=a, alpha=alpha) for half in own
            ]
            del gram, power
            gram = sharing.together(own, places)
    del gram, power, own
    return sharing.together(factor, places)


def _plus_diagonal(
    power: Tensor, alpha: float, a: float, start: int, products: Products
) -> Tensor:
    """Rows of ``a + alpha·P`` from row ``start`` on."""
    made = products.rounded(torch.mul(power, alpha))
    made.diagonal(start).add_(a)
    return products.rounded(made)


def _standard(
    x: list[Tensor], steps: Steps, products: Products, sharing: Sharing
) -> None:
    """The standard iteration (``newton_schulz.standard_iteration``); see ``_gram``."""
    for step, (a, b, c) in enumerate(steps):
        unscale = products.unscale(is_last=step == len(steps) - 1)
        square = products.rounded(sharing.add([products.square(one) for one in x]))
        square, alpha = products.power_sum(square, b, c)
        beta = products.fold(square, a * unscale, alpha * unscale)
        for at, one in enumerate(x):
            x[at] = products.times(square, one, beta=beta, alpha=alpha * unscale)
        del square, one
