"""Newton-Schulz in place, as a step runs it; a GPU's way of it over a CPU's products,
too.

A GPU multiplies tall matrices as they are, and normalises them in their own dtype by a
power of two first; a CPU turns them over and normalises an fp32 copy. Both are the same
iteration.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_muon.orthogonalize import newton_schulz, normalization
from megatron_muon.orthogonalize.matmul import (
    TORCH_DTYPE,
    Products,
    numerics_on,
    scale_of,
)
from megatron_muon.orthogonalize.newton_schulz import (
    orthogonalize,
    orthogonalize_staged,
)
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.settings.config import MuonConfig

SETTINGS = [{"ns_steps": 4}, {"ns_steps": 5}, {"ns_iteration": "gram"}]
SHAPES = [(24, 40), (40, 24), (16, 16), (1, 7), (7, 1), (130, 520)]
FP32 = MuonConfig(ns_dtype="fp32")
# fp32's unit roundoff, 2^-24, through five steps: see
# test_coefficients.test_fp32_equals_the_oracle.
BOUND = 486 * 2.0**-24


def _takes_a_cpus_way(patch: pytest.MonkeyPatch, takes: bool) -> None:
    for module in (newton_schulz, normalization):
        patch.setattr(module, "is_cpu", lambda device: takes)


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _takes_a_cpus_way(monkeypatch, False)


def _matrix(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def _in_place(
    matrices: list[Tensor],
    config: MuonConfig,
    numerics: Numerics | None = None,
    **layout: int,
) -> list[Tensor]:
    """What becomes of them where they lie."""
    rows, cols = matrices[0].shape
    staged = torch.stack([_staged(matrix, **layout) for matrix in matrices])
    numerics = numerics or numerics_on(staged.device, config)
    staged = staged.to(TORCH_DTYPE[numerics.travels]).view(-1)
    moves = torch.ones(len(matrices), dtype=torch.bool)
    shape = {"rows": rows, "cols": cols, **layout}
    made = orthogonalize_staged(staged, moves, numerics, **shape)
    assert made.data_ptr() == staged.data_ptr()
    return [_in_rows(x, rows, cols, **layout) for x in made.view(len(matrices), -1)]


def _staged(matrix: Tensor, column_parts: int = 1, column_blocks: int = 1) -> Tensor:
    """Each part has, row by row, its piece of every block of columns."""
    blocks = matrix.chunk(column_blocks, dim=1)
    pieces = [block.chunk(column_parts, dim=1) for block in blocks]
    parts = [
        torch.cat([own[part] for own in pieces], dim=1) for part in range(column_parts)
    ]
    return torch.cat([part.reshape(-1) for part in parts])


def _in_rows(
    staged: Tensor, rows: int, cols: int, column_parts: int = 1, column_blocks: int = 1
) -> Tensor:
    parts = [
        part.view(rows, -1).chunk(column_blocks, dim=1)
        for part in staged.chunk(column_parts)
    ]
    return torch.cat(
        [own[block] for block in range(column_blocks) for own in parts], dim=1
    )


@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize(
    "layout", [{}, {"column_parts": 2}, {"column_parts": 2, "column_blocks": 3}]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", [(20, 36), (36, 12), (24, 24)])
def test_in_place_is_bitwise_the_direction(
    shape: tuple[int, int], dtype: Any, layout: dict[str, int], steps: int
) -> None:
    """Whichever of its two buffers the iteration ends in."""
    config = MuonConfig(ns_dtype=dtype, ns_steps=steps)
    matrix = _matrix(*shape).to(TORCH_DTYPE[Numerics(config).travels])
    (made,) = _in_place([matrix], config, **layout)
    assert torch.equal(made, orthogonalize(matrix, config))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpus_fp16_shares_memory_with_bf16(
    shape: tuple[int, int], settings: dict[str, Any], as_a_gpu: None
) -> None:
    """Matrices arrive in bf16, iterates of fp16 take their place, and directions in
    bf16 theirs.
    """
    products = Products(*[torch.float16] * 3, scale=scale_of("fp16"), folded=True)
    config = MuonConfig(ns_dtype="fp16", **settings)
    matrices = [_matrix(*shape, seed=seed).bfloat16() for seed in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(newton_schulz, "products_on", lambda *_: products)
        on_gpu = Numerics(config)  # and its restarts
        patch.setattr(newton_schulz, "numerics_on", lambda *_: on_gpu)
        for layout in ({}, {"column_parts": shape[1]}):
            made = _in_place(matrices, config, on_gpu, **layout)
            # entered in place or from a copy, a batch or one by one: the same numbers
            # but for sums, of which each is 2⁻¹¹ off at most and bf16 rounds the result
            # by 2⁻⁹
            for one, matrix in zip(made, matrices, strict=True):
                alone = orthogonalize(matrix, config)
                assert (one - alone).norm() <= 2.0**-7 * alone.norm()
    exact = orthogonalize(
        matrices[0], MuonConfig(ns_dtype="fp32", ns_steps=config.ns_steps)
    )
    assert (made[0] - exact).norm() <= 2.0**-6 * exact.norm()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpus_way_is_a_cpus(
    shape: tuple[int, int], settings: dict[str, Any], as_a_gpu: None
) -> None:
    config = MuonConfig(ns_dtype="fp32", **settings)
    matrices = [_matrix(*shape, seed=seed) for seed in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        _takes_a_cpus_way(patch, True)
        wanted = [orthogonalize(matrix, config) for matrix in matrices]
    for layout in ({}, {"column_parts": shape[1]}):
        for made, direction in zip(
            _in_place(matrices, config, **layout), wanted, strict=True
        ):
            assert (made - direction).norm() <= 2 * BOUND * max(shape)


@pytest.mark.parametrize(
    "name, steps", [("simple", 5), ("quintic", 5), ("polar_express", 8)]
)
@pytest.mark.parametrize("shape", [(520, 130), (7, 1), (500, 130)])
def test_a_tall_matrix_has_its_squares_in_the_next_iterates_memory(
    shape: tuple[int, int],
    name: Any,
    steps: int,
    as_a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From four squares' room on, and with the same result."""
    settings: dict[str, Any] = {"ns_coefficients": name, "ns_steps": steps}
    config = MuonConfig(ns_dtype="fp32", ns_iteration="gram", **settings)
    matrix = _matrix(*shape)
    made: list[tuple[int, ...]] = []
    empty = Tensor.new_empty

    def counted(like: Tensor, size: Any, **kind: Any) -> Tensor:
        made.append(tuple(size))
        return empty(like, size, **kind)

    monkeypatch.setattr(Tensor, "new_empty", counted)
    (direction,) = _in_place([matrix], config)
    monkeypatch.undo()
    square = (shape[1], shape[1])
    each = 0 if shape[0] >= 4 * shape[1] else 1
    assert made.count(square) == each * len(Numerics(config, "cpu").segments)
    assert (direction - orthogonalize(matrix, config)).norm() <= 2 * BOUND * max(shape)


@pytest.mark.parametrize("config", [MuonConfig(), FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("exponent", [-130, -100, 100, 126])
def test_a_gpus_way_does_not_depend_on_the_scale(
    exponent: int, config: MuonConfig, as_a_gpu: None
) -> None:
    """Squares of such entries are 0 or Inf in fp32; those that become subnormal round,
    so that the smallest scale is of entries that are no multiple of much less than its
    largest.
    """
    matrix = _matrix(12, 20).bfloat16().float().clamp(-1.9, 1.9)
    if exponent < -126:
        matrix = (matrix * 4).round() / 4
    scaled = (matrix.double() * 2.0**exponent).float()
    (made,), (wanted,) = (_in_place([x], config) for x in (scaled, matrix))
    assert torch.equal(made, wanted)


@pytest.mark.parametrize("config", [MuonConfig(), FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("gpu", [False, True])
def test_what_is_zero_or_does_not_move_is_zero(
    gpu: bool, config: MuonConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _takes_a_cpus_way(monkeypatch, not gpu)
    matrices = torch.stack([_matrix(6, 10), torch.zeros(6, 10), _matrix(6, 10, seed=1)])
    staged = matrices.to(TORCH_DTYPE[Numerics(config).travels]).view(-1)
    moves = torch.tensor([True, True, False])
    orthogonalize_staged(
        staged, moves, numerics_on(staged.device, config), rows=6, cols=10
    )
    first, zero, still = staged.view(3, 6, 10)
    assert first.norm() > 1 and not zero.any() and not still.any()
