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

Where ``MuonConfig.ns_iteration`` is None it is ``iteration_of``'s.
"""

from __future__ import annotations

import itertools
from typing import Literal

from megatron_muon.coefficients import NsDtype, Triple, restarts_of, schedule
from megatron_muon.config import MuonConfig, NsIteration
from megatron_muon.setting_names import named

# cpu_bf16 has instructions for products in bf16; on cpu all products are made in fp32.
# cuda_symmetric has a library's kernel for symmetric products in 16 bits (``matmul``).
Device = Literal["cpu", "cpu_bf16", "cuda", "cuda_symmetric"]
Segments = tuple[tuple[Triple, ...], ...]

# On CPU a symmetric product of at least this many rows is made in four panels of rows, each up to
# the diagonal only: 10 of 16 blocks. On one thread that is 1.25 to 1.6 times as fast in fp32, 1.05
# to 1.6 times in bf16; smaller ones are not faster in panels.
_PANELS, _PANELLED = 4, 384

# A library's kernel makes tiles of 256 rows up to the diagonal: 9 of 16 at 2,048 rows, 3 of 4 at
# 512, 17 of 32 at 4,096. Counted are 9 of 16, whole numbers for every size that it takes, so that
# homes balance time and not the flops of plain products. Rows begin at multiples of 16 bytes.
_KERNEL_TILE, _KERNEL_ALIGNMENT = 256, 8
_KERNEL_FLOPS = 9, 16

# The auto iteration's table: (short side from here on, gram is taken where its flops are at most
# this fraction of standard's). Measured on CPUs by `megatron-muon bench newton-schulz`, one thread,
# cpu_bf16 with AVX512_BF16. On CUDA nothing is measured: limits are the time model's of an H100,
# the largest with which no shape is more than 2 % slower, alone or in a batch
# (test_pricing_iterations). Small matrices by themselves take as long as their kernels'
# number, so gains of batches of such are missed.
_AUTO: dict[Device, tuple[tuple[int, float], ...]] = {
    "cpu": ((0, 0.0), (64, 0.8), (256, 0.85), (384, 0.75)),
    "cpu_bf16": ((0, 0.0), (128, 0.7), (256, 0.8), (384, 0.6), (512, 0.67), (1024, 0.8)),
    "cuda": (
        *((0, 0.0), (384, 0.41), (448, 0.45), (512, 0.48), (576, 0.54), (640, 0.6), (768, 0.62)),
        *((896, 0.75), (1024, 0.79), (1536, 0.88), (2560, 0.94)),
    ),
    "cuda_symmetric": (
        *((0, 0.0), (257, 0.65), (320, 0.68), (384, 0.69), (448, 0.75), (576, 0.81), (640, 0.86)),
        *((896, 0.93), (1024, 0.95), (1536, 0.98), (1792, 1.0)),
    ),
}


def is_cuda(device: Device) -> bool:
    """Whether it is a GPU, of either kind."""
    return device in ("cuda", "cuda_symmetric")


def fits_kernel(size: int, inner: int) -> bool:
    """Whether a library's kernel takes a symmetric ``(size, inner) @ (inner, size)``: one that is
    aligned and has more than one of its tiles."""
    aligned = size % _KERNEL_ALIGNMENT == 0 and inner % _KERNEL_ALIGNMENT == 0
    return size > _KERNEL_TILE and aligned


def iteration_of(config: MuonConfig, device: Device) -> NsIteration:
    """The iteration that a run takes on a device.

    The setting ``ns_iteration``; None: ``auto`` on a GPU where restarts are known for the
    coefficients, the number of steps and the dtype, ``standard`` elsewhere.
    """
    if config.ns_iteration is not None:
        return config.ns_iteration
    return "auto" if is_cuda(device) and _restarts(config, device) is not None else "standard"


def held_dtype(ns_dtype: NsDtype, device: Device) -> NsDtype:
    """The dtype of products, and of the Gram iteration's square matrices."""
    if is_cuda(device) or (device == "cpu_bf16" and ns_dtype == "bf16"):
        return ns_dtype
    return "fp32"


def schedule_of(config: MuonConfig) -> tuple[Triple, ...]:
    """(a, b, c) of each step."""
    return schedule(config.ns_coefficients, config.ns_steps, config.ns_dtype)


def segments(config: MuonConfig, device: Device) -> Segments:
    """The steps' coefficients, cut where the Gram iteration restarts."""
    steps, restarts = schedule_of(config), _restarts(config, device)
    if restarts is None:  # where MuonConfig would have refused it
        raise ValueError(
            f"no restarts are known for {named('ns_coefficients')} {config.ns_coefficients!r}"
        )
    cuts = (0, *restarts, config.ns_steps)
    return tuple(steps[start:stop] for start, stop in itertools.pairwise(cuts))


def takes_gram(rows: int, cols: int, config: MuonConfig, device: Device) -> bool:
    """Whether a matrix of this shape gets the Gram iteration."""
    iteration = iteration_of(config, device)
    if iteration != "auto":
        return iteration == "gram"
    short, kind = min(rows, cols), _kind(config, device)
    if kind == "cuda_symmetric" and not fits_kernel(short, short):
        kind = "cuda"
    limit = max(entry for entry in _AUTO[kind] if entry[0] <= short)[1]
    gram = _gram_flops(rows, cols, segments(config, device), kind)
    return gram <= limit * _standard_flops(rows, cols, config, kind)


def ns_flops(rows: int, cols: int, config: MuonConfig, device: Device = "cuda") -> int:
    """Floating-point operations of a matrix's Newton-Schulz, 2 per multiply-add.

    Products only. Symmetric ones as ``symmetric_flops``; a library's (``matmul``) are not seen by
    torch's flop counter.
    """
    kind = _kind(config, device)
    if takes_gram(rows, cols, config, device):
        return _gram_flops(rows, cols, segments(config, device), kind)
    return _standard_flops(rows, cols, config, kind)


def costs_follow_device(config: MuonConfig, device: Device) -> bool:
    """Whether ``ns_flops`` can be others than the standard iteration's with plain products, which
    are the same on every device."""
    return iteration_of(config, device) != "standard" or _kind(config, device) == "cuda_symmetric"


def scratch_elements(rows: int, cols: int) -> int:
    """Beside a matrix itself: the next iterate, and squares of the short side.

    The standard iteration has two. The Gram iteration has four, of which as many as fit, at most
    three, are in the memory of the next iterate.
    """
    short, long = min(rows, cols), max(rows, cols)
    squares = 2 if long >= 2 * short else 3
    return rows * cols + squares * short**2


def panels(size: int) -> list[tuple[int, int]]:
    """The ranges of rows that a symmetric product on CPU is made in."""
    count = _PANELS if size >= _PANELLED else 1
    return list(itertools.pairwise(part * size // count for part in range(count + 1)))


def symmetric_flops(size: int, inner: int, device: Device) -> int:
    """Flops of a symmetric ``(size, inner) @ (inner, size)``: on a CPU those of blocks up to the
    diagonal, with a library's kernel the share that it makes, elsewhere on CUDA all of them."""
    if is_cuda(device):
        whole = 2 * size * size * inner
        share, of = _KERNEL_FLOPS
        by_kernel = device == "cuda_symmetric" and fits_kernel(size, inner)
        return whole * share // of if by_kernel else whole
    return sum(2 * (stop - start) * stop * inner for start, stop in panels(size))


def _kind(config: MuonConfig, device: Device) -> Device:
    """The device by what its products have: in fp32 no bf16 instructions and no library."""
    if held_dtype(config.ns_dtype, device) != "fp32":
        return device
    return "cuda" if is_cuda(device) else "cpu"


def _restarts(config: MuonConfig, device: Device) -> tuple[int, ...] | None:
    """After which steps; None where that is not known."""
    lists = restarts_of(config.ns_coefficients, config.ns_steps)
    squares: str = held_dtype(config.ns_dtype, device)
    kind = squares if squares == config.ns_dtype else "fp32_squares"
    restarts: tuple[int, ...] | None = getattr(lists, kind, None)
    return restarts


def _standard_flops(rows: int, cols: int, config: MuonConfig, device: Device) -> int:
    """Each step is XXᵀ (2m²n), AA (2m³; none where c is 0) and BX (2m²n). A CPU makes no panels."""
    short, long = min(rows, cols), max(rows, cols)
    steps = schedule_of(config)
    squares = sum(c != 0 for _, _, c in steps)
    kind = device if is_cuda(device) else "cuda"
    whole = symmetric_flops(short, long, kind) + 2 * short * short * long
    return len(steps) * whole + squares * symmetric_flops(short, short, kind)


def _gram_flops(rows: int, cols: int, parts: Segments, device: Device) -> int:
    """A segment is XXᵀ, QX and between them, of (m, m): RR (none where c is 0) in each step, QZ in
    each but the first, two products for the next R in each but the last."""
    short, long = min(rows, cols), max(rows, cols)
    whole = symmetric_flops(short, long, device) + 2 * short * short * long
    square = symmetric_flops(short, short, device)
    squares = sum(sum(c != 0 for _, _, c in part) + 3 * (len(part) - 1) for part in parts)
    return len(parts) * whole + squares * square
