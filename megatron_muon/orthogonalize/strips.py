"""Newton-Schulz of a matrix of which several ranks have a strip each: a range of the long side.

The polynomial of a step is one of the short side's square XXᵀ, which is a sum over strips. So the
ranks add their squares (``Sharing``), make the same polynomial of the sum, and apply it to their
own strips. In the standard iteration that is one sum in each step, in the Gram iteration one in
each segment. Sums are made in the order of strips, so a result depends on how many there are, and
not on the ranks that have them. It differs from a whole matrix's by rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_muon.config import MuonConfig
from megatron_muon.orthogonalize.gram import factor_of
from megatron_muon.orthogonalize.iteration import dtype_of, schedule_of, segments, takes_gram
from megatron_muon.orthogonalize.matmul import (
    Products,
    direction_dtype,
    fp32_is_fp32,
    plan_device,
    products_on,
)
from megatron_muon.orthogonalize.normalization import power_of_two


class Sharing(Protocol):
    """The homes of a matrix's strips; each of them calls the same methods in the same order."""

    def all_numbers(self, mine: Tensor) -> Tensor:
        """The numbers of all strips.

        Args:
            mine: ``(strips here, k)`` fp32.

        Returns:
            ``(strips, k)`` in the order of strips.
        """

    def add(self, squares: Sequence[Tensor]) -> Tensor:
        """The sum over all strips, added in fp32 in their order, and rounded to their dtype.

        Args:
            squares: ``(m, m)`` of each strip that is here.
        """


def orthogonalize_strips(
    strips: Sequence[Tensor],
    whole: tuple[int, int],
    moves: Tensor,
    config: MuonConfig,
    sharing: Sharing,
) -> None:
    """Turn the strips that are here into those of the matrix's direction, in place.

    Args:
        strips: each a view whose first dim is the matrix's rows or a range of them, and whose other
            dims are its columns or a range of them, in ``matmul.travel_dtype``. How it lies in
            memory changes no bit. Its memory takes the directions, in ``matmul.direction_dtype``.
        whole: rows and columns of the matrix.
        moves: ``(len(strips),)`` bool: whether a strip has a gradient. Without any, the direction
            is zero.
        config: the settings whose names begin with ``ns_`` are read.
        sharing: the matrix's other homes.
    """
    device = strips[0].device
    products = products_on(device, dtype_of(config, plan_device(device)))
    is_tall = whole[0] > whole[1]
    entered = _entered(strips, moves, products, sharing)
    # (m, n) with the short side first; a tall strip is a view, and stays as it is in memory
    x = [one.mT if is_tall else one for one in entered]
    del entered
    with fp32_is_fp32(device):
        if takes_gram(*whole, config, plan_device(device)):
            _gram(x, config, products, sharing)
        else:
            _standard(x, config, products.plain(), sharing)
    for strip, direction in zip(strips, x, strict=True):
        made = (direction.mT if is_tall else direction).reshape(strip.shape)
        strip.view(direction_dtype(config, device)).copy_(made)


def _entered(
    strips: Sequence[Tensor], moves: Tensor, products: Products, sharing: Sharing
) -> list[Tensor]:
    """New ``(rows, columns)`` of the strips, divided by the whole matrix's norm, for products.

    The power of two below the matrix's largest entry is divided out first, which rounds nothing.
    """
    largest = torch.stack([torch.linalg.vector_norm(one, math.inf).float() for one in strips])
    every = sharing.all_numbers(torch.stack([largest, moves.float()], dim=1))
    power = power_of_two(every[:, 0].amax())
    # a sum goes by the order of elements in memory: rows, and the matrix's columns in them
    made = [torch.div(one.flatten(1).float(), power) for one in strips]
    squares = torch.stack([torch.linalg.vector_norm(one).square() for one in made])
    norm = sharing.all_numbers(squares[:, None]).sum().sqrt()
    moving = (norm > 0) & (every[:, 1].sum() > 0)
    by = torch.where(moving, norm, math.inf)
    return [products.enter(one.div_(by)) for one in made]


def _gram(x: list[Tensor], config: MuonConfig, products: Products, sharing: Sharing) -> None:
    """The Gram iteration (``gram.gram_iteration``), which replaces the strips of ``x``."""
    of_squares, parts = products.of_squares(), segments(config, plan_device(x[0].device))
    for number, part in enumerate(parts):
        leave = products.leave(is_last=number == len(parts) - 1)
        gram = of_squares.rounded(sharing.add([of_squares.square(one) for one in x]))
        factor = factor_of(gram, part, of_squares)
        for at, one in enumerate(x):
            x[at] = products.times(factor, one, alpha=leave)
        del gram, factor, one  # the next sum needs their memory


def _standard(x: list[Tensor], config: MuonConfig, products: Products, sharing: Sharing) -> None:
    """The standard iteration (``newton_schulz.standard_iteration``); see ``_gram``."""
    steps = schedule_of(config)
    for step, (a, b, c) in enumerate(steps):
        leave = products.leave(is_last=step == len(steps) - 1)
        square = products.rounded(sharing.add([products.square(one) for one in x]))
        alpha = b
        if c != 0:
            square, alpha = products.symmetric(square, square, square, beta=b, alpha=c), 1.0
        beta = products.fold(square, a * leave, alpha * leave)
        for at, one in enumerate(x):
            x[at] = products.times(square, one, beta=beta, alpha=alpha * leave)
        del square, one
