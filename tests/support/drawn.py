"""Matrices on which the Gram iteration can go wrong, drawn by number, and the products
of a GPU.

``figures.restart_errors`` walks 10,000 of them to choose the restarts; ``WORST`` are
the worst.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import get_args

import torch
from torch import Tensor

from megatron_muon.orthogonalize.gram import gram_iteration
from megatron_muon.orthogonalize.matmul import (
    TORCH_DTYPE,
    Products,
    numerics_on,
    products_on,
    scale_of,
)
from megatron_muon.orthogonalize.newton_schulz import standard_iteration
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.settings.coefficients import (
    GRAM_ERROR,
    GRAM_LEAST,
    GRAM_TOP,
    CoefficientName,
    NsDtype,
    Triple,
    schedule,
)
from megatron_muon.settings.config import MuonConfig
from support.matrices import polynomials

# Short and long sides.
_SIDES = """
    1x1 1x2 1x9 1x64 2x2 2x3 2x5 2x16 2x64 3x3 3x4 3x8 3x32 4x4 4x7 4x16 5x5 5x6
    6x24 7x7 8x8 8x12 8x64 12x12 12x48 16x16 16x20 16x64 16x128 24x24 24x36 32x32
    32x64 32x160 48x48 48x96 64x64 64x256 96x96 40x120
""".split()
SHAPES = [tuple(map(int, sides.split("x"))) for sides in _SIDES]
KINDS = """Gaussian
columns scaled
rows scaled
both scaled
half scaled
rows repeated
near rank 1
singular values""".splitlines()
WORST: tuple[int, ...] = (7570, 1572, 811, 4614, 684)
NUDGE: dict[NsDtype, float] = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}


def shape_of(number: int) -> tuple[int, ...]:
    """Short and long side of a drawn matrix."""
    return SHAPES[number % len(SHAPES)]


def kind_of(number: int) -> str:
    """The kind of a drawn matrix, one of ``KINDS``."""
    return KINDS[number // len(SHAPES) % len(KINDS)]


def drawn(number: int) -> Tensor:
    """A matrix in fp32, the same at every call; scales are down to 1e-8."""
    generator = torch.Generator().manual_seed(number)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    short, long = shape_of(number)
    kind = kind_of(number)
    x = normal(short, long)
    least = 10 ** (-8 * uniform(1))
    chance = float(uniform(1))
    if kind in ("columns scaled", "both scaled"):
        x *= least ** uniform(long)
    if kind in ("rows scaled", "both scaled"):
        x *= least ** uniform(short, 1)
    if kind == "half scaled":
        (x[:, long // 2 :] if chance < 0.5 else x[short // 2 :]).mul_(least)
    if kind == "rows repeated":
        x *= least
        x[: int(uniform(1) * short) + 1] += normal(1, long)
    if kind == "near rank 1":
        row = normal(1, long) if chance < 0.5 else torch.ones(1, long)
        alike = 0.25 < chance < 0.75
        x = x * least + (torch.ones(short, 1) if alike else normal(short, 1)) * row
    if kind == "singular values":
        right = torch.linalg.qr(x.mT)[0]
        left = torch.linalg.qr(normal(short, short))[0]
        x = (left * least ** uniform(short)) @ right.mT
    return x.float()


class Strips(Products):
    """XXᵀ is a sum of two rounded parts: of two strips, or of a product cut along its
    inner dim.
    """

    def short_square(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        parts = [
            self.square(part) for part in x.tensor_split(2, dim=-1) if part.size(-1)
        ]
        made = torch.stack(parts).sum(0)
        return self.rounded(made if out is None else out.copy_(made))


class Halves(Products):
    """Every product is a sum of two rounded parts: CUDA may add so in 16 bits
    (``matmul``).
    """

    def product(
        self,
        left: Tensor,
        right: Tensor,
        linear: Tensor | None = None,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        halves = zip(
            left.tensor_split(2, dim=-1), right.tensor_split(2, dim=-2), strict=True
        )
        made = alpha * torch.stack([self.rounded(a @ b) for a, b in halves]).sum(0)
        made = made if linear is None else made + beta * linear
        return self.rounded(made if out is None else out.copy_(made))


def roundings(field: str) -> Iterator[tuple[NsDtype, Products]]:
    """The dtype of X, and products as devices round them, that take one field of
    ``Restarts``.
    """
    fp32 = torch.float32
    if field == "fp32_squares":
        for dtype in get_args(NsDtype):
            yield dtype, Products(TORCH_DTYPE[dtype], fp32, fp32, scale_of(dtype))
        return
    dtype: NsDtype = field  # type: ignore[assignment]
    kind = TORCH_DTYPE[dtype]
    scale = scale_of(dtype)
    folded = Numerics(MuonConfig(ns_dtype=dtype)).folded
    for products in (Products, Strips, *((Halves,) if dtype != "fp32" else ())):
        yield dtype, products(kind, kind, fp32, scale, folded)
    if folded:
        yield dtype, Products(kind, kind, fp32, scale)  # rows of squares are not
    own = products_on(
        torch.device("cpu"),
        numerics_on(torch.device("cpu"), MuonConfig(ns_dtype=dtype)),
    )
    if dtype == "bf16" and own.squares == kind:
        yield dtype, own.plain()


@dataclass(frozen=True, slots=True)
class Trial:
    """Drawn matrices of one shape, with one rounding."""

    numbers: tuple[int, ...]  # of the matrices
    x: Tensor  # X as iterations take it, ``(k, m, n)``
    products: Products
    steps: tuple[Triple, ...]  # the polynomials
    exact: Tensor  # results in float64
    # errors, by the standard iteration's; infinite with ``Halves``, whose parts do not
    # round a matrix of rank 1 to one
    allowed: Tensor
    top: Tensor  # the largest singular values of exact and standard results

    def measured(self, restarts: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Errors and largest singular values of the Gram iteration, over what is
        allowed.
        """
        cuts = itertools.pairwise((0, *restarts, len(self.steps)))
        parts = tuple(self.steps[start:stop] for start, stop in cuts)
        made = gram_iteration(self.x, parts, self.products).double()
        errors = (
            _norm(made - self.exact) / _norm(self.exact) / self.allowed
        ).nan_to_num(math.inf)
        return errors, _top(made) / (GRAM_TOP * self.top)


def trials(
    name: CoefficientName, steps: int, field: str, numbers: Sequence[int]
) -> Iterator[Trial]:
    """Every shape in every rounding of a field of ``Restarts``.

    Standard's error is the worst of all roundings, and of X as it is and one unit up
    and down: one of them alone may by chance be exact.
    """
    of_dtype: dict[NsDtype, list[Products]] = defaultdict(list)
    for dtype, products in roundings(field):
        of_dtype[dtype].append(products)
    for dtype, devices in of_dtype.items():
        triples, nudge = schedule(name, steps), NUDGE[dtype]
        least = GRAM_LEAST[dtype]
        if field == "fp32_squares" and dtype == "fp32":  # well below one unit of bf16
            least = 2.0**-10
        for each, x, u, s, v in _shapes(tuple(numbers), dtype == "fp32"):
            values = polynomials(s, triples)
            exact = (u * values[:, None]) @ v
            error = torch.full((len(each),), least)
            top = values.abs().amax(-1)
            for products, factor in itertools.product(
                devices, (1 - nudge, 1.0, 1 + nudge)
            ):
                made = standard_iteration(
                    products.enter(products.scale * x * factor), triples, products
                ).double()
                error = torch.maximum(error, _norm(made - exact) / _norm(exact))
                top = torch.maximum(top, _top(made))
            for products in devices:
                allowed = (
                    torch.tensor(math.inf)
                    if type(products) is Halves
                    else GRAM_ERROR * error
                )
                yield Trial(
                    each,
                    products.enter(products.scale * x),
                    products,
                    triples,
                    exact,
                    allowed,
                    top,
                )


@cache
def _shapes(
    numbers: tuple[int, ...], is_fp32: bool
) -> list[tuple[tuple[int, ...], Tensor, Tensor, Tensor, Tensor]]:
    """(numbers, matrices of norm 1, their singular value decomposition) of each shape.

    Matrices travel in bf16, but for fp32's.
    """
    of_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number in numbers:
        of_shape[shape_of(number)].append(number)
    made = []
    for each in of_shape.values():
        x = torch.stack([drawn(number) for number in each])
        x = x if is_fp32 else x.bfloat16().float()
        u, s, v = torch.linalg.svd(
            x.double() / _norm(x.double())[:, None, None], full_matrices=False
        )
        made.append((tuple(each), x / _norm(x)[:, None, None], u, s, v))
    return made


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1))


def _top(x: Tensor) -> Tensor:
    """The largest singular values of matrices whose short side is first."""
    x = x.nan_to_num(1e30, 1e30, -1e30).clamp(-1e30, 1e30)
    return torch.linalg.eigvalsh(x @ x.mT)[:, -1].clamp_min(0).sqrt()
