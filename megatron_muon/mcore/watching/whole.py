"""Numbers of a whole matrix at its home: orthogonality, effective rank, spectral norm.

A matrix lies there in staging order, ``(like.numel,)`` of any floating dtype, so its columns are
permuted; no number here depends on that. It is read in panels, converted to fp32 one at a time,
which bounds scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_muon.planning.slices import Matrix

PANEL = 1 << 22  # elements of a panel, at most, unless a row or column has more
FIRST_ITERATIONS, ITERATIONS = 30, 8  # of the power iteration: from a random start, and warm


def effective_rank(staged: Tensor, like: Matrix) -> Tensor:
    """(Σσ²)² / Σσ⁴, the participation ratio of the squared singular values σ².

    It is 1 for a matrix of rank 1, and the short side for an orthogonal one. NaN for zeros.
    """
    gram = _gram(staged, like, 1.0 / staged.abs().amax().float())  # squares must not underflow
    trace = gram.diagonal().double().sum()
    rank: Tensor = trace.square() / torch.linalg.vector_norm(gram).double().square()
    return rank


def orthogonality_error(direction: Tensor, like: Matrix) -> Tensor:
    """‖XXᵀ - I‖ / √short side for a direction X (rows ≤ cols; else XᵀX): 0 if it is orthogonal.

    It is the root mean square of σ² - 1 over the singular values σ.
    """
    gram = _gram(direction, like, None)
    gram.diagonal().sub_(1.0)
    error: Tensor = torch.linalg.vector_norm(gram).double()
    return error / math.sqrt(min(like.rows, like.cols))


def start_vector(like: Matrix, seed: int, device: torch.device) -> Tensor:
    """A random unit vector ``(cols,)`` for ``spectral_norm``; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)  # its own: the run's numbers stay as they are
    vector = torch.randn(like.cols, generator=generator).to(device)
    unit: Tensor = vector / torch.linalg.vector_norm(vector)
    return unit


def spectral_norm(
    weight: Tensor, like: Matrix, vector: Tensor, iterations: int
) -> tuple[Tensor, Tensor]:
    """The largest singular value by power iteration, which comes near it from below.

    Returns:
        The value, and the unit vector to start from the next time.
    """
    square = vector.new_zeros(())
    for _ in range(iterations):
        product = torch.zeros_like(vector)
        for panel in _row_panels(weight, like):
            product.addmv_(panel.T, panel.mv(vector))
        square = torch.linalg.vector_norm(product)
        vector = torch.where(square > 0, product / square, vector)
    return square.double().sqrt(), vector


def _gram(staged: Tensor, like: Matrix, factor: Tensor | None) -> Tensor:
    """XXᵀ of X = ``factor`` × the matrix, or XᵀX where it has more rows than columns; fp32."""
    short, wide = min(like.rows, like.cols), like.rows <= like.cols
    gram = torch.zeros(short, short, device=staged.device)
    for panel in _column_panels(staged, like) if wide else _row_panels(staged, like):
        panel = panel if factor is None else panel * factor
        panel = panel if wide else panel.T
        gram.addmm_(panel, panel.T)
    return gram


def _row_panels(staged: Tensor, like: Matrix) -> Iterator[Tensor]:
    for panel in torch.split(_parts(staged, like), max(1, PANEL // like.cols), 1):
        yield panel.transpose(0, 1).reshape(-1, like.cols).float()


def _column_panels(staged: Tensor, like: Matrix) -> Iterator[Tensor]:
    most = max(1, PANEL // (like.rows * like.column_parts))
    for panel in torch.split(_parts(staged, like), most, 2):
        yield panel.transpose(0, 1).reshape(like.rows, -1).float()


def _parts(staged: Tensor, like: Matrix) -> Tensor:
    return staged.view(like.column_parts, like.rows, like.cols // like.column_parts)
