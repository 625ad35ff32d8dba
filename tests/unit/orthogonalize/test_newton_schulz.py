"""Newton-Schulz of one matrix, against float64 and at the edges of the number range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_muon.orthogonalize.newton_schulz import orthogonalize
from megatron_muon.settings.config import MuonConfig, NsIteration
from support.expected.oracle import newton_schulz

SHAPES = [(16, 16), (24, 40), (40, 24), (1, 7), (7, 1), (65, 130)]
BF16 = MuonConfig(ns_dtype="bf16")
FP32 = MuonConfig(ns_dtype="fp32")


def _matrix(rows: int, cols: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    return torch.randn(rows, cols, generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_singular_values_are_in_the_band(shape: tuple[int, int]) -> None:
    """The coefficients keep σ in [0.68, 1.13] from 0.02 of the norm on (the Muon post);
    bf16 rounds each entry by 2⁻⁹ relative, which moves a singular value by at most that
    of the norm.
    """
    matrix = _matrix(*shape)
    s = torch.linalg.svdvals(matrix.double())
    found = torch.linalg.svdvals(orthogonalize(matrix, BF16).double())[
        s / s.norm() > 0.02
    ]
    # five steps, each rounds a matrix of norm √rank
    slack = 5 * 2.0**-9 * min(shape) ** 0.5
    assert found.min() > 0.68 - slack and found.max() < 1.13 + slack


@pytest.mark.parametrize("shape", [(64, 256), (256, 64)], ids=str)
@pytest.mark.parametrize("iteration", ["standard", "gram"])
def test_fp16_keeps_entries_far_below_the_norm(
    shape: tuple[int, int], iteration: NsIteration
) -> None:
    """One entry is the norm, the others are 1e-8 of it: below half of fp16's smallest
    number, 3e-8, unless the norm is scaled. Scaled by 128 they have 21 steps of 2⁻²⁴
    each, half of one is 2.4 %.
    """
    matrix = 1e-8 * _matrix(*shape).sign()
    matrix[0] = matrix[:, 0] = 0
    matrix[0, 0] = 1.0
    config = MuonConfig(ns_dtype="fp16", ns_iteration=iteration)
    found = orthogonalize(matrix, config).double()[1:, 1:]
    exact = newton_schulz(matrix.double())[1:, 1:]
    assert (found - exact).norm() <= 0.03 * exact.norm()


def test_rank_one_and_subnormal_are_finite() -> None:
    for matrix in (torch.ones(8, 8), torch.full((4, 6), 1e-42), torch.eye(5) * 3e38):
        for config in (BF16, FP32):
            assert orthogonalize(matrix, config).isfinite().all()


def test_only_a_matrix_is_taken() -> None:
    with pytest.raises(ValueError, match=r"2 dims, .*\(2, 3, 4\)"):
        orthogonalize(torch.zeros(2, 3, 4), BF16)
