"""Which Newton-Schulz iteration a matrix gets, where it restarts, and what that costs.

Plain integers, the same on every rank. With m the short and n the long side, X of shape (m, n):

standard
    each step is A = XXᵀ, B = bA + cA² and X ← aX + BX.
gram
    works on R = XXᵀ and Q, of shape (m, m), with Q = 1 at first (README of
    https://github.com/Dao-AILab/gram-newton-schulz/tree/f08f25e1b24112ec28a12001e67cd4fc4615dfe7):
    each step is Z = bR + cR², Q ← aQ + QZ and, unless X is made next, R ← (a + Z)R(a + Z). X ← QX
    is made at the end and at every restart, where R = XXᵀ and Q = 1 begin anew: R has the squares
    of the singular values, so what rounding does to it grows from step to step.
auto
    one of the two, by the matrix's shape.
"""

from __future__ import annotations

import itertools
from typing import Literal

from megatron_muon.coefficients import NsDtype, Triple, restarts_of, schedule
from megatron_muon.config import MuonConfig
from megatron_muon.setting_names import named

# cpu_bf16 has instructions for products in bf16; on cpu all products are made in fp32.
Device = Literal["cpu", "cpu_bf16", "cuda"]
Segments = tuple[tuple[Triple, ...], ...]

# On CPU a symmetric product of at least this many rows is made in four panels of rows, each up to
# the diagonal only: 10 of 16 blocks. On one thread that is 1.25 to 1.6 times as fast in fp32, 1.05
# to 1.6 times in bf16; smaller ones are not faster in panels.
_PANELS, _PANELLED = 4, 384

# The auto iteration's table: (short side from here on, gram is taken where its flops are at most
# this fraction of standard's). Measured on CPUs by `megatron-muon bench newton-schulz`, one thread,
# cpu_bf16 with AVX512_BF16; cuda's has not been measured.
_AUTO: dict[Device, tuple[tuple[int, float], ...]] = {
    "cpu": ((0, 0.0), (64, 0.8), (256, 0.85), (384, 0.75)),
    "cpu_bf16": ((0, 0.0), (128, 0.7), (256, 0.8), (384, 0.6), (512, 0.67), (1024, 0.8)),
    "cuda": ((0, 0.0), (256, 0.9)),
}


def held_dtype(ns_dtype: NsDtype, device: Device) -> NsDtype:
    """What products are made in, and the Gram iteration's square matrices are kept in."""
    if device == "cuda" or (device == "cpu_bf16" and ns_dtype == "bf16"):
        return ns_dtype
    return "fp32"


def schedule_of(config: MuonConfig) -> tuple[Triple, ...]:
    """(a, b, c) of each step."""
    return schedule(config.ns_coefficients, config.ns_steps, config.ns_dtype)


def segments(config: MuonConfig, device: Device) -> Segments:
    """The steps' coefficients, cut where the Gram iteration restarts."""
    steps = schedule_of(config)
    lists = restarts_of(config.ns_coefficients, config.ns_steps)
    squares: str = held_dtype(config.ns_dtype, device)
    kind = squares if squares == config.ns_dtype else "fp32_squares"
    restarts = getattr(lists, kind, None)
    if restarts is None:  # where MuonConfig would have refused it
        raise ValueError(
            f"no restarts are known for {named('ns_coefficients')} {config.ns_coefficients!r}"
        )
    cuts = (0, *restarts, config.ns_steps)
    return tuple(steps[start:stop] for start, stop in itertools.pairwise(cuts))


def takes_gram(rows: int, cols: int, config: MuonConfig, device: Device) -> bool:
    """Whether a matrix of this shape gets the Gram iteration."""
    if config.ns_iteration != "auto":
        return config.ns_iteration == "gram"
    short = min(rows, cols)
    in_fp32 = device == "cpu_bf16" and held_dtype(config.ns_dtype, device) == "fp32"
    table = _AUTO["cpu" if in_fp32 else device]
    limit = max(entry for entry in table if entry[0] <= short)[1]
    gram = _gram_flops(rows, cols, segments(config, device), device)
    return gram <= limit * _standard_flops(rows, cols, config)


def ns_flops(rows: int, cols: int, config: MuonConfig, device: Device = "cuda") -> int:
    """Floating-point operations of a matrix's Newton-Schulz, 2 per multiply-add.

    Products only. A library's symmetric products (``matmul``), which torch's flop counter does
    not see, are counted as if they were plain.
    """
    if takes_gram(rows, cols, config, device):
        return _gram_flops(rows, cols, segments(config, device), device)
    return _standard_flops(rows, cols, config)


def scratch_elements(rows: int, cols: int) -> int:
    """Beside a matrix itself: the next iterate, and two squares of the short side."""
    return rows * cols + 2 * min(rows, cols) ** 2


def panels(size: int) -> list[tuple[int, int]]:
    """The ranges of rows that a symmetric product on CPU is made in."""
    count = _PANELS if size >= _PANELLED else 1
    return list(itertools.pairwise(part * size // count for part in range(count + 1)))


def symmetric_flops(size: int, inner: int, device: Device) -> int:
    """Of a symmetric ``(size, inner) @ (inner, size)``: on CPU only blocks up to the diagonal."""
    if device == "cuda":
        return 2 * size * size * inner
    return sum(2 * (stop - start) * stop * inner for start, stop in panels(size))


def _standard_flops(rows: int, cols: int, config: MuonConfig) -> int:
    """Each step is XXᵀ (2m²n), AA (2m³; none where c is 0) and BX (2m²n)."""
    short, long = min(rows, cols), max(rows, cols)
    steps = schedule_of(config)
    squares = sum(c != 0 for _, _, c in steps)
    return 2 * short * short * (2 * long * len(steps) + short * squares)


def _gram_flops(rows: int, cols: int, parts: Segments, device: Device) -> int:
    """A segment is XXᵀ, QX and between them, of (m, m): RR (none where c is 0) in each step, QZ in
    each but the first, two products for the next R in each but the last."""
    short, long = min(rows, cols), max(rows, cols)
    whole = symmetric_flops(short, long, device) + 2 * short * short * long
    square = symmetric_flops(short, short, device)
    squares = sum(sum(c != 0 for _, _, c in part) + 3 * (len(part) - 1) for part in parts)
    return len(parts) * whole + squares * square
