"""``TRITON_INTERPRET=1 python -m support.kernels.interpreted_symmetric``: symmetric
products beside those in fp64.

Operands are fp16: the interpreter multiplies bf16 numbers as the integers that hold
them. Each element of the result is written exactly once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from megatron_muon.orthogonalize.symmetric_kernels import launch_symmetric

# (matrices, short side, long side): whole tiles, one element more, less than a tile,
# more rows of tiles than a group has, and lines that start at no multiple of 16 bytes
SHAPES = (
    (1, 128, 64),
    (2, 256, 72),
    (1, 129, 128),
    (3, 24, 200),
    (2, 97, 33),
    (1, 1160, 40),
)
KINDS = ("XXᵀ", "XᵀX", "bS + cSS", "of every second column")
_SHARED_MEMORY = 164 << 10


def operands(kind: str, shape: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Left, right, and the symmetric matrix of the linear term."""
    matrices, short, long = shape
    generator = torch.Generator().manual_seed(short)

    def numbers(rows: int, cols: int) -> Tensor:
        made = torch.randn(matrices, rows, cols, generator=generator, dtype=torch.half)
        return made / 8

    square = numbers(short, short)
    square = square + square.mT
    if kind == "bS + cSS":
        return square, square, square
    if kind == "XᵀX":
        x = numbers(long, short)
        return x.mT, x, square
    x = numbers(short, long)
    if kind == "of every second column":  # of a wider matrix: rows lie apart
        x = numbers(short, 2 * long)[:, :, :long]
    return x, x.mT, square


def case(
    kind: str, shape: tuple[int, int, int], alpha: float, beta: float | None
) -> None:
    """One product, whose elements are within a rounding of fp16 and of fp32's sums."""
    left, right, square = operands(kind, shape)
    linear = None if beta is None else square
    out = torch.full_like(square, torch.nan)
    with stored() as addresses:
        product(left, right, linear, out, alpha, beta or 0.0)
    exact = alpha * (left.double() @ right.double())
    if beta is not None:
        exact += beta * square.double()
    size = left.double().abs() @ right.double().abs()
    bound = exact.abs() * 2.0**-11 + abs(alpha) * size * 2.0**-20 + 2.0**-20
    assert ((out.double() - exact).abs() <= bound).all(), (kind, shape, alpha, beta)
    assert out.equal(out.mT), (kind, shape)
    places = np.arange(out.data_ptr(), out.data_ptr() + 2 * out.numel(), 2)
    assert np.array_equal(np.sort(np.concatenate(addresses)), places), (kind, shape)
    for at in range(
        len(out) if len(out) > 1 else 0
    ):  # a batch's bits are those of each matrix alone
        alone = torch.full_like(out[at], torch.nan)
        added = None if linear is None else linear[at]
        product(left[at], right[at], added, alone, alpha, beta or 0.0)
        assert alone.equal(out[at]), (kind, shape)


def product(
    left: Tensor,
    right: Tensor,
    linear: Tensor | None,
    out: Tensor,
    alpha: float,
    beta: float,
) -> None:
    """The kernel's product, into ``out``."""
    launch_symmetric(
        *(left, right, linear, out),
        beta=beta,
        alpha=alpha,
        shared_memory=_SHARED_MEMORY,
    )


def refused(linear: Tensor | None, out: Tensor) -> None:
    """Squares whose columns are contiguous, or nothing: they would be read as rows."""
    x = torch.ones(len(out), 8, dtype=torch.half)
    before = out.clone()
    try:
        product(x, x.mT, linear, out, 1.0, 1.0)
    except ValueError as error:
        assert "rows of a square are not contiguous" in str(error)
        assert out.equal(before)
        return
    raise AssertionError(out.stride())


@contextmanager
def stored() -> Iterator[list[Any]]:
    """Within it, the addresses at which the interpreter stores, of each store."""
    addresses: list[Any] = []
    real = interpreter.InterpreterBuilder.create_masked_store

    def noting(self: Any, ptrs: Any, value: Any, mask: Any, *policy: Any) -> Any:
        addresses.append(ptrs.data[mask.data])
        return real(self, ptrs, value, mask, *policy)

    builder = interpreter.InterpreterBuilder
    with mock.patch.object(builder, "create_masked_store", noting):
        yield addresses


def main() -> None:
    """All kinds, shapes and terms; prints how many agree."""
    terms = ((1.0, None), (-4.775, None), (2.0315, -4.775))
    cases = list(itertools.product(KINDS, SHAPES[:-1], terms))
    cases.append((KINDS[0], SHAPES[-1], terms[-1]))
    for kind, shape, (alpha, beta) in cases:
        case(kind, shape, alpha, beta)
    square = torch.zeros(16, 16, dtype=torch.half)
    refused(None, torch.zeros(16, 32, dtype=torch.half)[:, ::2])
    refused(square.mT, square.clone())
    print(f"{len(cases)} cases agree")


if __name__ == "__main__":
    main()
