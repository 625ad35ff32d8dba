"""``megatron-muon bench newton-schulz --accuracy``: the error of every iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_muon.lab.bench.newton_schulz.inputs import inputs
from megatron_muon.orthogonalize.gram import gram_iteration
from megatron_muon.orthogonalize.iteration import takes_gram
from megatron_muon.orthogonalize.matmul import Products, numerics_on
from megatron_muon.orthogonalize.newton_schulz import (
    orthogonalize,
    standard_iteration,
)
from megatron_muon.settings.coefficients import SETS, CoefficientName, NsDtype
from megatron_muon.settings.config import MuonConfig

_EXACT = Products(torch.float64, squares=torch.float64, held=torch.float64)
_RANK = 1e-13  # singular values below this fraction of the largest count as zero


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The accuracy of one iteration on one input.

    Attributes:
        coefficients, steps, dtype, iteration: settings of the iteration.
        shape, input: shape of the input, and its description.
        smallest, largest: range of the direction's largest singular values, as many as the input's
            rank.
        polar: Frobenius distance to the exact polar factor UVᵀ, over the square root of the rank.
        error: Frobenius distance to the same iteration in float64, relative to its norm.
        finite: whether every element of the direction is finite.
    """

    coefficients: str
    steps: int
    dtype: str
    iteration: str
    shape: str
    input: str
    smallest: float
    largest: float
    polar: float
    error: float
    finite: bool


def measured(
    names: Sequence[CoefficientName],
    steps: int | None,
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[NsDtype],
    device: torch.device,
) -> Iterator[Accuracy | str]:
    """Every set, dtype and iteration on every input of every shape, or the text of its refusal.

    Args:
        names: names of the coefficient sets.
        steps: number of steps for all sets; None: each set's own.
        shapes: (short side, long side) of each shape.
        dtypes: dtypes in which matrices are multiplied.
        device: the device that computes.
    """
    matrices = [
        (what, matrix, *_polar(matrix)) for shape in shapes for what, matrix in inputs(*shape)
    ]
    for name in names:
        for dtype in dtypes:
            for iteration in ("standard", "gram"):
                try:
                    config = MuonConfig(
                        ns_coefficients=name,
                        ns_steps=steps or SETS[name].steps,
                        ns_dtype=dtype,
                        ns_iteration=iteration,
                    )
                except ValueError as refusal:
                    yield f"{name}, {dtype}, {iteration}: refused: {refusal}"
                    continue
                for what, matrix, polar, rank in matrices:
                    yield _measured(config, what, matrix.to(device), polar, rank)


def _measured(config: MuonConfig, what: str, matrix: Tensor, polar: Tensor, rank: int) -> Accuracy:
    numerics = numerics_on(matrix.device, config)
    made = orthogonalize(matrix.float(), config).double().cpu()
    exact = in_float64(matrix.float(), config).cpu()
    finite = bool(made.isfinite().all())
    values = torch.linalg.svdvals(made)[:rank] if finite else torch.full((1,), torch.nan)
    return Accuracy(
        coefficients=str(config.ns_coefficients),
        steps=config.ns_steps,
        dtype=numerics.dtype,
        iteration=numerics.iteration,
        shape=f"{matrix.size(0)}x{matrix.size(1)}",
        input=what,
        smallest=float(values.min()),
        largest=float(values.max()),
        polar=float((made - polar).norm()) / rank**0.5,
        error=float((made - exact).norm() / exact.norm()),
        finite=finite,
    )


def in_float64(matrix: Tensor, config: MuonConfig) -> Tensor:
    """The same iteration of the same fp32 matrix with every product in float64."""
    x = matrix.double()
    x = x / x.norm()
    numerics = numerics_on(matrix.device, config)
    if takes_gram(matrix.size(0), matrix.size(1), numerics):
        return gram_iteration(x, numerics.segments, _EXACT)
    return standard_iteration(x, numerics.steps, _EXACT)


def table(accuracies: Sequence[Accuracy | str]) -> str:
    """The accuracies as a table in Markdown, with the refusals below."""
    heads = ["set", "steps", "dtype", "iteration", "shape", "input", "singular values"]
    lines = [[*heads, "to the polar factor", "to float64"], ["---"] * 9]
    for row in accuracies:
        if isinstance(row, str):
            continue
        band = f"{row.smallest:.3f} to {row.largest:.3f}" if row.finite else "NOT FINITE"
        lines.append(
            [
                *(row.coefficients, str(row.steps), row.dtype, row.iteration, row.shape),
                *(row.input, band, f"{row.polar:.1e}", f"{row.error:.1e}"),
            ]
        )
    text = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*text, "", *(row for row in accuracies if isinstance(row, str))])


def as_json(accuracies: Sequence[Accuracy | str]) -> list[object]:
    return [row if isinstance(row, str) else dataclasses.asdict(row) for row in accuracies]


def _polar(matrix: Tensor) -> tuple[Tensor, int]:
    """The polar factor UVᵀ, without null singular values, and the matrix's rank."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((s > _RANK * s[0]).sum())
    return u[:, :rank] @ v[:rank], rank
