"""The Newton-Schulz iteration that a matrix gets, and its cost.

Plain integers, the same on every rank. With m the short and n the long side, X of shape
(m, n):

standard
    each step is A = XXᵀ, B = bA + cA² and X ← aX + BX.
gram works on R = XXᵀ and Q, of shape (m, m), with Q = 1 at first (README of
    https://github.com/Dao-AILab/gram-newton-schulz/tree/f08f25e1b24112ec28a12001e67cd4fc4615dfe7):
    each step is Z = bR + cR², Q ← aQ + QZ and, unless X is made next, R ← (a + Z)R(a +
    Z). X ← QX is made at the end and at every restart, which then sets R = XXᵀ and Q =
    1. Restarts are needed since R has the squares of the singular values: its rounding
    errors grow from step to step.
auto
    one of the two, by the matrix's shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from megatron_muon.orthogonalize.numerics import (
    Device,
    Numerics,
    has_kernel,
    is_cuda,
)
from megatron_muon.settings.coefficients import Triple
from megatron_muon.settings.run import NODE

# On a CPU a symmetric product of at least 384 rows is made in four panels of rows, each
# up to the diagonal only: 10 of 16 blocks. On one thread that is 1.25 to 1.6 times as
# fast in fp32, 1.05 to 1.6 times in bf16. Smaller products are not faster in panels.
_PANELS, _PANELLED = 4, 384

# From which short side on each home of a shared matrix makes rows of its squares, by
# the number of strips. On a CPU from where products take longer than messages of a
# few hundred KiB. CUDA's are of the time model of an H100: four homes' rows gain from
# 4,096 on, those of two from 6,144 on. A library's kernel makes half a square, so
# that two strips do not pay, and four do later. More strips than a node has GPUs
# (``node_ranks``) would send rows far.
_BY_ROWS: dict[Device, tuple[tuple[range, int], ...]] = {
    "cpu": ((range(2, 1 << 30), 256),),
    "cpu_bf16": ((range(2, 1 << 30), 256),),
    "cuda": ((range(2, 4), 6144), (range(4, NODE + 1), 4096)),
    "cuda_symmetric": ((range(4, NODE + 1), 6144),),
    "cuda_triton": ((range(4, NODE + 1), 6144),),
}

# A library's kernel makes tiles of 256 rows up to the diagonal: 3 of 4 at 512 rows, 9
# of 16 at 2,048, 17 of 32 at 4,096. Flops are counted as 9 of 16 at every size, always
# a whole number, so that homes balance time and not the flops of plain products. Rows
# begin at multiples of 16 bytes.
_KERNEL_ALIGNMENT = 8
_KERNEL_SHARE = 9, 16
# The fewest rows of such a product. That of quack-kernels takes 0.48 of torch's time at
# 8,192 rows of an H200, 1.15 at 4,096, 9.4 at 2,048 (docs/validation.md). That of this
# package was timed on no GPU; it takes more than one tile.
KERNEL_ROWS: dict[Device, int] = {"cuda_symmetric": 6144, "cuda_triton": 264}

# The auto iteration compares flops, and a number of flops for each kernel: as many as
# products of full size do in the time that a small kernel takes longer than its flops.
# The Gram iteration has more kernels, and more of them are small. CUDA's numbers are
# those of an H100's time model (test_auto_iteration), a CPU's are measured by
# `megatron-muon bench newton-schulz` on one thread, cpu_bf16's with AMX and with
# AVX512_BF16. On a CPU products of squares are slower than those with the long side,
# too: Gram is taken where it costs at most 4 of 5 parts of the standard iteration.
_FLOPS_OF_KERNEL: dict[Device, int] = {
    "cpu": 100_000,
    "cpu_bf16": 50_000_000,
    "cuda": 800_000_000,
    "cuda_symmetric": 450_000_000,
    "cuda_triton": 450_000_000,
}
_CPU_SHARE = 4, 5


def fits_kernel(size: int, inner: int, device: Device) -> bool:
    """Whether a device's kernel makes a symmetric ``(size, inner) @ (inner, size)``.

    Its rows must be aligned, and so many that it is faster than torch.
    """
    aligned = size % _KERNEL_ALIGNMENT == 0 and inner % _KERNEL_ALIGNMENT == 0
    return aligned and has_kernel(device) and size >= KERNEL_ROWS[device]


@lru_cache(65536)
def takes_gram(rows: int, cols: int, numerics: Numerics) -> bool:
    """Whether a matrix of this shape gets the Gram iteration."""
    if numerics.iteration != "auto":
        return numerics.iteration == "gram"
    short = min(rows, cols)
    long = max(rows, cols)
    kind = _products_of_squares(short, numerics)
    gram = _flops(short, long, numerics, kind, takes_gram=True)
    plain = _kind_of(kind, takes_gram=False)
    standard = _flops(short, long, numerics, plain, takes_gram=False)
    of_kernel = _FLOPS_OF_KERNEL[kind]
    gram += of_kernel * _gram_kernels(numerics, kind)
    standard += of_kernel * _standard_kernels(numerics, kind)
    share, of = (1, 1) if numerics.on_gpu else _CPU_SHARE
    return of * gram <= share * standard


def ns_flops(rows: int, cols: int, numerics: Numerics) -> int:
    """Floating-point operations of a matrix's Newton-Schulz, 2 per multiply-add.

    Only products count, symmetric ones as in ``symmetric_flops``. torch's flop counter
    does not see those of a library (``matmul``).
    """
    return strip_flops(rows, cols, max(rows, cols), numerics)


@lru_cache(65536)
def strip_flops(
    rows: int,
    cols: int,
    long: int,
    numerics: Numerics,
    *,
    number: int = 0,
    count: int = 1,
) -> int:
    """``ns_flops`` of a rank that has strip ``number`` of ``count``, ``long`` of the
    long side.

    It makes the whole squares, or its rows of them (``makes_rows``).
    """
    short = min(rows, cols)
    takes = strips_take_gram(rows, cols, count, numerics)
    kind = _kind_of(numerics.products, takes_gram=takes)
    square = None
    if makes_rows(rows, cols, count, numerics):
        start, stop = square_rows(short, number, count)
        square = 2 * (stop - start) * short * short
    return _flops(short, long, numerics, kind, takes_gram=takes, square=square)


def repeated_flops(rows: int, cols: int, count: int, numerics: Numerics) -> int:
    """The part of ``strip_flops`` that a home with several strips of a matrix makes
    once.
    """
    by_rows = makes_rows(rows, cols, count, numerics)
    return 0 if by_rows else strip_flops(rows, cols, 0, numerics)


@lru_cache(4096)
def makes_rows(rows: int, cols: int, count: int, numerics: Numerics) -> bool:
    """Whether each home of a matrix in ``count`` strips makes rows of its squares.

    Such a matrix gets the Gram iteration wherever ``ns_iteration`` leaves the choice.
    """
    if numerics.on_gpu and count > numerics.config.node_ranks:
        return False
    if numerics.iteration == "standard" and not _powers(numerics.steps):
        return False
    short = min(rows, cols)
    kind = _products_of_squares(short, numerics)
    return any(count in counts and short >= least for counts, least in _BY_ROWS[kind])


def strips_take_gram(rows: int, cols: int, count: int, numerics: Numerics) -> bool:
    """``takes_gram`` of a matrix in ``count`` strips."""
    if numerics.iteration == "auto" and makes_rows(rows, cols, count, numerics):
        return True
    return takes_gram(rows, cols, numerics)


def square_rows(short: int, number: int, count: int) -> tuple[int, int]:
    """Start and stop of the rows of each square that strip ``number`` of ``count``
    makes.
    """
    return number * short // count, (number + 1) * short // count


def gathers_of_rows(
    rows: int, cols: int, count: int, numerics: Numerics
) -> tuple[int, ...]:
    """How often rows are put together after each sum of squares.

    Squares are added in each step of the standard iteration, whose P is put together
    then, or in each Gram segment: then P and R of a step, and Q. A segment of one step
    needs only the rows of its P.
    """
    by_rows = makes_rows(rows, cols, count, numerics)
    if not strips_take_gram(rows, cols, count, numerics):
        return tuple(int(by_rows and c != 0) for _, _, c in numerics.steps)
    if not by_rows:
        return (0,) * len(numerics.segments)
    return tuple(
        len(part) + (_powers(part) if len(part) > 1 else 0)
        for part in numerics.segments
    )


def scratch_elements(rows: int, cols: int) -> int:
    """Elements of memory beside a matrix itself: the next iterate, and squares of the
    short side.

    The standard iteration has two squares. The Gram iteration has four; as many as fit,
    at most three, are in the memory of the next iterate.
    """
    short = min(rows, cols)
    long = max(rows, cols)
    squares = 2 if long >= 2 * short else 3
    return rows * cols + squares * short**2


def squares_outside(rows: int, cols: int) -> int:
    """How many of the Gram iteration's four squares are not in the memory of the next
    iterate.

    Three may be, and all of a tall matrix with room for four (``newton_schulz``).
    """
    fit = rows * cols // min(rows, cols) ** 2
    return 0 if rows > cols and fit >= 4 else 4 - min(3, fit)


def panels(size: int) -> list[tuple[int, int]]:
    """The ranges of rows in which a CPU makes a symmetric product."""
    count = _PANELS if size >= _PANELLED else 1
    return list(itertools.pairwise(part * size // count for part in range(count + 1)))


def symmetric_flops(size: int, inner: int, device: Device) -> int:
    """Flops of a symmetric ``(size, inner) @ (inner, size)``.

    A CPU makes blocks up to the diagonal, a library's kernel a share of them, CUDA's
    matmul all.
    """
    if is_cuda(device):
        whole = 2 * size * size * inner
        share, of = _KERNEL_SHARE
        by_kernel = fits_kernel(size, inner, device)
        return whole * share // of if by_kernel else whole
    return sum(2 * (stop - start) * stop * inner for start, stop in panels(size))


def _products_of_squares(short: int, numerics: Numerics) -> Device:
    """The kind of device whose products of ``(short, short)`` these are."""
    kind = numerics.products
    is_plain = is_cuda(kind) and not fits_kernel(short, short, kind)
    return "cuda" if is_plain else kind


def _kind_of(products: Device, *, takes_gram: bool) -> Device:
    """The kind of device whose squares an iteration makes: a CPU uses panels in Gram's
    only.
    """
    return products if takes_gram or is_cuda(products) else "cuda"


def _flops(
    short: int,
    long: int,
    numerics: Numerics,
    kind: Device,
    *,
    takes_gram: bool,
    square: int | None = None,
) -> int:
    """Flops of an iteration; ``square`` are those of a product of (m, m), by default a
    whole symmetric one.

    standard
        each step is XXᵀ, AA (none where c is 0) and BX (2m²n).
    gram
        a segment is XXᵀ, QX and, between them, products of (m, m): RR in each step
        (none where c is 0), QZ in each but the first, and two products for the next R
        in each but the last.
    """
    if square is None:
        square = symmetric_flops(short, short, kind)
    whole = symmetric_flops(short, long, kind) + 2 * short * short * long
    if takes_gram:
        parts = numerics.segments
        squares = sum(_powers(part) + 3 * (len(part) - 1) for part in parts)
        return len(parts) * whole + squares * square
    return len(numerics.steps) * whole + _powers(numerics.steps) * square


def _standard_kernels(numerics: Numerics, device: Device) -> int:
    """Kernels of the standard iteration: in each step XXᵀ, bA + cA² (none where c is
    0), and aX + BX, whose linear term is a copy or, folded, a sum on B's diagonal.
    """
    powers = _powers(numerics.steps)
    return 3 * len(numerics.steps) + powers * _kernels_with_linear_term(device)


def _gram_kernels(numerics: Numerics, device: Device) -> int:
    """Kernels of the Gram iteration: XXᵀ and QX in each segment, and its squares.

    Only P = bR + cR² has a linear term where linear terms are folded; then H = a + P is
    a sum on its diagonal.
    """
    with_linear_term = _kernels_with_linear_term(device)
    count = 0
    for part in numerics.segments:
        powers = _powers(part)
        others = 3 * (len(part) - 1)
        count += 2
        if numerics.folded and powers == len(part):
            count += powers * (with_linear_term + 1) + others
        else:  # and the first Q is a product with a number, and a sum on its diagonal
            count += (powers + others) * with_linear_term + 2
    return count


def _powers(steps: Sequence[Triple]) -> int:
    """In how many steps the square A of X is multiplied with itself."""
    return sum(c != 0 for _, _, c in steps)


def _kernels_with_linear_term(device: Device) -> int:
    """Kernels of a product of squares with a linear term, which all but a library's
    kernel copy first.
    """
    return 1 if has_kernel(device) else 2
