"""The triton source of a matrix's norm and of its division. Only ``normalization``
imports it.

A matrix is read in tiles of rows and columns: once for its norm, once to be divided. So
both take matrices whose column parts lie one after another. A tile's squares are added
in units of the power of two below its own largest entry: none over- or underflows, and
no pass looks for the largest first. A tile's place follows from the matrix's shape
alone, and so does the order of sums.

Each operation is rounded by itself, as in ``rules.fused_kernels``. A quotient below
2^-126 may become zero, as a power of two is divided out before.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a tile, the most columns of it, and its warps: 32 elements a thread.
TILE, COLUMNS, WARPS = 8192, 1024, 8
_AT_ONCE = 1024  # tiles whose squares one program adds at a time
LAUNCH: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}
EXPONENT = tl.constexpr(0x7F800000)  # exponent bits of an fp32 number
# A power of two from 2^-126 to 2^126, whose reciprocal is a normal number, has these
# bits; those of its reciprocal are the rest of ONE.
LEAST = tl.constexpr(1 << 23)
MOST = tl.constexpr(253 << 23)
ONE = tl.constexpr(254 << 23)


# Triton would compile a variant wherever one of these is 1 or a multiple of 16, so at
# new shapes in the middle of a step. ``EIGHTS`` says of all of them what matters: rows
# start at 16 bytes.
_ARGUMENTS = [
    "source",
    "into",
    "rows",
    "width",
    "parts",
    "per_matrix",
    "matrix_stride",
    "row_stride",
    "block_stride",
    "part_stride",
    "into_matrix_stride",
    "into_row_stride",
    "into_block_stride",
    "into_part_stride",
]


@triton.jit
def eights(x, EIGHTS: tl.constexpr):
    """``x``; with EIGHTS the compiler sees that it is a multiple of 8."""
    if EIGHTS:
        x = x // 8 * 8
    return x


@triton.jit
def _tile(
    rows, width, parts, per_matrix, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr
):
    """This program's matrix, block, part, rows and columns, and which elements there
    are.
    """
    program = tl.program_id(0)
    matrix, tile = program // per_matrix, program % per_matrix
    across = tl.cdiv(width, TILE_COLS)
    down = tl.cdiv(rows, TILE_ROWS)
    outer, within = tile // (across * down), tile % (across * down)
    row = (within // across) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    col = (within % across) * TILE_COLS + tl.arange(0, TILE_COLS)
    here = (row < rows)[:, None] & (col < width)[None, :]
    return (
        matrix.to(tl.int64),
        outer // parts,
        outer % parts,
        row.to(tl.int64),
        col,
        here,
    )


@triton.jit
def _reciprocal(bits):
    """1 / p of the power of two with these bits."""
    return (-bits + ONE).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=_ARGUMENTS)
def squares_kernel(
    source,
    made,
    matrix_stride,
    row_stride,
    block_stride,
    part_stride,
    rows,
    width,
    parts,
    per_matrix,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    EIGHTS: tl.constexpr,
):
    """For each tile the power of two below its largest entry, and the sum of (x /
    power)².
    """
    matrix, block, part, row, col, here = _tile(
        rows, eights(width, EIGHTS), parts, per_matrix, TILE_ROWS, TILE_COLS
    )
    start = source + matrix * matrix_stride + block * block_stride + part * part_stride
    if EIGHTS:
        start = tl.multiple_of(start, 16)
    at = start + row[:, None] * eights(row_stride, EIGHTS) + col[None, :]
    x = tl.load(at, mask=here, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    bits = largest.to(tl.int32, bitcast=True) & EXPONENT
    bits = tl.minimum(tl.maximum(bits, LEAST), MOST)
    x = x * _reciprocal(bits)
    to = made + 2 * tl.program_id(0)
    tl.store(to, bits.to(tl.float32, bitcast=True))
    tl.store(to + 1, tl.sum(tl.sum(x * x, axis=1), axis=0))


@triton.jit(do_not_specialize=["per_matrix", "scale"])
def norm_kernel(
    tiles,
    moves,
    made,
    per_matrix,
    scale,
    HAS_MOVES: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Two divisors of each matrix: a power of two, and its norm in units of it over
    ``scale``.

    The second is infinite where the matrix is zero or does not move, NaN where an entry
    is not finite.
    """
    matrix = tl.program_id(0)
    first = tiles + 2 * matrix.to(tl.int64) * per_matrix
    powers = tl.zeros((AT_ONCE,), tl.float32)
    start = 0
    while start < per_matrix:
        at = start + tl.arange(0, AT_ONCE)
        powers = tl.maximum(
            powers, tl.load(first + 2 * at, mask=at < per_matrix, other=0.0)
        )
        start += AT_ONCE
    power = tl.max(powers, axis=0)
    inverse = _reciprocal(power.to(tl.int32, bitcast=True))
    squares = tl.zeros((AT_ONCE,), tl.float32)
    start = 0
    while start < per_matrix:
        at = start + tl.arange(0, AT_ONCE)
        own = tl.load(first + 2 * at, mask=at < per_matrix, other=0.0) * inverse
        one = tl.load(first + 2 * at + 1, mask=at < per_matrix, other=0.0)
        squares = squares + (one * own) * own
        start += AT_ONCE
    norm = tl.math.sqrt_rn(tl.sum(squares, axis=0)) * scale
    has_direction = norm > 0.0
    if HAS_MOVES:
        has_direction = has_direction & (tl.load(moves + matrix) != 0)
    tl.store(made + 2 * matrix, power)
    by = tl.where(has_direction, norm, float("inf"))
    is_finite = (norm.to(tl.int32, bitcast=True) & EXPONENT) != EXPONENT
    tl.store(made + 2 * matrix + 1, tl.where(is_finite, by, float("nan")))


@triton.jit(do_not_specialize=_ARGUMENTS)
def divide_kernel(
    source,
    into,
    divisors,
    matrix_stride,
    row_stride,
    block_stride,
    part_stride,
    into_matrix_stride,
    into_row_stride,
    into_block_stride,
    into_part_stride,
    rows,
    width,
    parts,
    per_matrix,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    EIGHTS: tl.constexpr,
):
    """Each entry over both divisors of its matrix; the first division rounds
    nothing.
    """
    matrix, block, part, row, col, here = _tile(
        rows, eights(width, EIGHTS), parts, per_matrix, TILE_ROWS, TILE_COLS
    )
    power = tl.load(divisors + 2 * matrix).to(tl.int32, bitcast=True)
    norm = tl.load(divisors + 2 * matrix + 1)
    start = source + matrix * matrix_stride + block * block_stride + part * part_stride
    if EIGHTS:
        start = tl.multiple_of(start, 16)
    at = start + row[:, None] * eights(row_stride, EIGHTS) + col[None, :]
    x = tl.load(at, mask=here, other=0.0)
    x = x.to(tl.float32) * _reciprocal(power)
    x = tl.math.div_rn(x, tl.zeros_like(x) + norm)
    start = (
        into
        + matrix * into_matrix_stride
        + block * into_block_stride
        + part * into_part_stride
    )
    if EIGHTS:
        start = tl.multiple_of(start, 16)
    at = start + row[:, None] * eights(into_row_stride, EIGHTS) + col[None, :]
    tl.store(at, x.to(into.dtype.element_ty), mask=here)


def launch_norms(source: Tensor, moves: Tensor | None, scale: float) -> Tensor:
    """The divisors of matrices, two launches; see ``normalization.divisors``."""
    tile, of_matrix = _grid(source)
    count, per_matrix = source.size(0), of_matrix["per_matrix"]
    tiles = source.new_empty((count * per_matrix, 2), dtype=torch.float32)
    squares_kernel[(count * per_matrix,)](
        source,
        tiles,
        *_strides(source),
        **of_matrix,
        **tile,
        EIGHTS=_in_eights(source),
        **LAUNCH,
    )
    made = source.new_empty((count, 2), dtype=torch.float32)
    norm_kernel[(count,)](
        tiles,
        tiles if moves is None else moves.view(torch.uint8),
        made,
        per_matrix,
        scale,
        HAS_MOVES=moves is not None,
        AT_ONCE=_AT_ONCE,
        **LAUNCH,
    )
    return made


def launch_divide(source: Tensor, into: Tensor, divisors: Tensor) -> None:
    """Write matrices over their divisors, one launch; see
    ``normalization.divisors``.
    """
    tile, of_matrix = _grid(source)
    divide_kernel[(source.size(0) * of_matrix["per_matrix"],)](
        source,
        into,
        divisors,
        *_strides(source),
        *_strides(into),
        **of_matrix,
        **tile,
        EIGHTS=_in_eights(source) and _in_eights(into),
        **LAUNCH,
    )


def _in_eights(x: Tensor) -> bool:
    """Whether each row of a part starts at 16 bytes, and is a multiple of 8
    elements.
    """
    strides = [
        stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1
    ]
    return x.data_ptr() % 16 == 0 and not any(n % 8 for n in (x.size(4), *strides[:-1]))


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    """Strides of matrices, rows, blocks and parts."""
    matrix, row, block, part, _ = x.stride()
    return matrix, row, block, part


def _grid(source: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Shape of a tile, and of a matrix ``(rows, blocks, parts, width)`` in tiles."""
    _, rows, blocks, parts, width = source.shape
    cols = min(COLUMNS, triton.next_power_of_2(width))
    tile = {"TILE_ROWS": TILE // cols, "TILE_COLS": cols}
    tiles = blocks * parts * triton.cdiv(rows, TILE // cols) * triton.cdiv(width, cols)
    return tile, {"rows": rows, "width": width, "parts": parts, "per_matrix": tiles}
