"""Newton-Schulz in strips: the whole matrix's but for rounding, and no less
accurate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import get_args

import pytest
import torch
from torch import Tensor

from megatron_muon.orthogonalize.iteration import makes_rows
from megatron_muon.orthogonalize.matmul import TORCH_DTYPE, numerics_on
from megatron_muon.orthogonalize.newton_schulz import orthogonalize
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.orthogonalize.strips import orthogonalize_strips
from megatron_muon.settings.coefficients import NsDtype
from megatron_muon.settings.config import MuonConfig, NsIteration
from support.expected.oracle import newton_schulz
from support.small_squares import rows_of_small_squares

SHAPES = [(528, 96), (96, 528), (512, 128), (130, 64), (129, 387)]


class Here:
    """All strips of a matrix are on this rank."""

    def __init__(self, count: int) -> None:
        self.count, self.numbers = count, range(count)

    def all_numbers(self, mine: Tensor) -> Tensor:
        return mine

    def add(self, squares: Sequence[Tensor]) -> Tensor:
        total = torch.zeros_like(squares[0], dtype=torch.float32)
        for square in squares:
            total += square
        return total.to(squares[0].dtype)

    def together(self, rows: Tensor) -> Tensor:
        return rows


def _in_strips(
    matrix: Tensor, count: int, config: MuonConfig, moves: object = True
) -> Tensor:
    made = matrix.to(TORCH_DTYPE[Numerics(config).travels]).clone()
    long = 0 if made.size(0) > made.size(1) else 1
    edges = [at * made.size(long) // count for at in range(count + 1)]
    strips = [made.narrow(long, start, stop - start) for start, stop in pairwise(edges)]
    flags = torch.tensor([moves] * count if isinstance(moves, bool) else moves)
    orthogonalize_strips(
        strips, tuple(made.shape), flags, numerics_on(flags.device, config), Here(count)
    )
    return made.view(TORCH_DTYPE[numerics_on(made.device, config).dtype])


@cache
def _drawn(rows: int, cols: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows + 7 * cols + seed)
    spread = torch.logspace(0, -3, min(rows, cols))
    left = torch.linalg.qr(torch.randn(rows, min(rows, cols), generator=generator))[0]
    right = torch.linalg.qr(torch.randn(cols, min(rows, cols), generator=generator))[0]
    return (left * spread) @ right.T


def _matrix(rows: int, cols: int, seed: int = 0) -> Tensor:
    return _drawn(rows, cols, seed).clone()


@cache
def _exact(rows: int, cols: int, seed: int, dtype: torch.dtype) -> Tensor:
    return newton_schulz(_matrix(rows, cols, seed).to(dtype).double())


@pytest.mark.parametrize("by_rows", [False, True], ids=["whole squares", "rows"])
@pytest.mark.parametrize("dtype", get_args(NsDtype))
@pytest.mark.parametrize("iteration", ["standard", "gram"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strips_are_as_accurate_as_the_whole_matrix(
    shape: tuple[int, int], iteration: NsIteration, dtype: NsDtype, *, by_rows: bool
) -> None:
    """Against float64. Squares round once more, before they are added: errors of single
    inputs go either way, so means over inputs are compared, and a tenth is left to
    chance.
    """
    config = MuonConfig(ns_iteration=iteration, ns_dtype=dtype)
    apart: dict[int, float] = {}
    with rows_of_small_squares(16 if by_rows else 1 << 20):
        assert makes_rows(*shape, 2, Numerics(config, "cpu")) == by_rows
        for seed in range(6):
            travels = TORCH_DTYPE[Numerics(config).travels]
            matrix = _matrix(*shape, seed=seed).to(travels)
            exact = _exact(*shape, seed, matrix.dtype)
            whole = orthogonalize(matrix, config)
            for count in (1, 2, 4, 8):
                found = _in_strips(matrix, count, config) if count > 1 else whole
                error = (found.double() - exact).norm() / exact.norm()
                apart[count] = apart.get(count, 0.0) + float(error)
    assert all(apart[count] < 1.1 * apart[1] for count in (2, 4, 8)), apart


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e30])
def test_the_scale_of_a_matrix_does_not_matter(scale: float) -> None:
    """The largest entry is that of all strips: a strip may have no entry near it.

    Squares of 1e-20 are 0 in fp32. No entry may become subnormal, where a power of two
    rounds.
    """
    config = MuonConfig(ns_dtype="fp32")
    matrix = _matrix(528, 96)
    matrix[:264] *= 1e-3
    power = 2.0 ** round(torch.tensor(scale).log2().item())
    assert _in_strips(matrix * power, 4, config).equal(_in_strips(matrix, 4, config))


def test_a_matrix_without_a_gradient_gets_no_direction() -> None:
    config = MuonConfig()
    matrix = _matrix(528, 96)
    assert not _in_strips(matrix, 2, config, moves=False).any()
    assert not _in_strips(torch.zeros(528, 96), 2, config).any()
    # a gradient in one strip
    moved = _in_strips(matrix, 2, config, moves=[False, True])
    assert moved.equal(_in_strips(matrix, 2, config))
