"""Matrices that are hard for Newton-Schulz, and its exact results for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_muon import MuonConfig
from megatron_muon.orthogonalize.matmul import Products
from megatron_muon.orthogonalize.normalization import normalize_
from megatron_muon.settings.coefficients import Triple

PANELS = Products(
    torch.float64, squares=torch.float64, held=torch.float64, blocked=True
)
CONDITIONS = (1e0, 1e1, 1e2, 1e3, 1e4, 1e6, 1e8)


def config_of(name: Any, steps: int, dtype: Any, iteration: Any) -> MuonConfig:
    """Settings of Newton-Schulz."""
    return MuonConfig(
        ns_coefficients=name, ns_steps=steps, ns_dtype=dtype, ns_iteration=iteration
    )


def drawn(rows: int, cols: int) -> Tensor:
    """A Gaussian matrix; the same at every call."""
    return torch.randn(
        rows, cols, generator=torch.Generator().manual_seed(rows + 7 * cols)
    )


def inputs(short: int, long: int) -> Iterator[tuple[str, Tensor]]:
    """(description, matrix of shape ``(short, long)`` in float64); the same at every
    call.
    """
    generator = torch.Generator().manual_seed(0)
    for condition in CONDITIONS:
        exponents = torch.linspace(0, 1, short, dtype=torch.float64)
        spectrum = condition**-exponents
        yield f"condition {condition:.0e}", with_spectrum(spectrum, long, generator)
    gaussian = torch.randn(short, long, generator=generator, dtype=torch.float64)
    yield "Gaussian", gaussian
    yield "entries at 1e-30", gaussian * 1e-30
    yield "entries at 1e30", gaussian * 1e30
    for rank in dict.fromkeys((1, 4, short // 2)):
        yield f"rank {rank}", with_spectrum(_first(rank, short, 0.0), long, generator)
    for rest in (1e-1, 3e-2, 1e-2, 1e-3, 1e-5):
        spectrum = _first(1, short, rest)
        yield f"rank 1 + {rest:.0e}", with_spectrum(spectrum, long, generator)
    for rest in (1e-1, 1e-2):
        alike = (
            torch.randn(short, long, generator=generator, dtype=torch.float64) * rest
        )
        alike[:8] += torch.randn(1, long, generator=generator, dtype=torch.float64)
        yield f"8 rows alike + {rest:.0e}", alike
    yield "all ones", torch.ones(short, long, dtype=torch.float64)


def with_spectrum(spectrum: Tensor, long: int, generator: torch.Generator) -> Tensor:
    """A matrix ``(short, long)`` in float64 with these singular values and random
    vectors.
    """
    short = spectrum.numel()
    u, v = (
        torch.linalg.qr(
            torch.randn(size, short, generator=generator, dtype=torch.float64)
        )[0]
        for size in (short, long)
    )
    made: Tensor = (u * spectrum) @ v.mT
    return made


def exactly(matrix: Tensor, steps: tuple[Triple, ...]) -> Tensor:
    """The exact result in float64: the polynomials applied to the normalized singular
    values.
    """
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    made: Tensor = (u * polynomials(s / s.square().sum().sqrt(), steps)) @ v
    return made


def polynomials(values: Tensor, steps: tuple[Triple, ...]) -> Tensor:
    """The steps' composed polynomials at ``values``, in their dtype."""
    for a, b, c in steps:
        values = a * values + b * values**3 + c * values**5
    return values


def _first(rank: int, size: int, rest: float) -> Tensor:
    spectrum = torch.full((size,), rest, dtype=torch.float64)
    spectrum[:rank] = 1.0
    return spectrum


def normalize(x: Tensor) -> Tensor:
    """A new fp32 matrix over its Frobenius norm, as a CPU has it; zero stays zero."""
    made = x.to(torch.float32, copy=True)
    normalize_(made[None])
    return made
