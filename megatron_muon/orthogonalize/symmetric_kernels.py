"""The triton source of a product that is known to be symmetric, at half its work.

Of ``beta·linear + alpha·left@right`` only tiles up to the diagonal are computed. Each
is stored twice: where it is, and transposed on the other side of the diagonal. Of a
tile on the diagonal only the lower half is stored, twice. So no element is written
twice, and the result is symmetric to the bit.

Sums are in fp32, along the inner dimension in one order, and rounded once. A matrix's
bits follow from its own operands: a batch gives the same as each matrix alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# Rows and columns of a tile, inner elements that are multiplied at a time, and rows of
# tiles whose programs start together, so that their operands are still in the L2 cache.
TILE, INNER, GROUP = 128, 64, 8
# Bytes of shared memory of one stage: a tile's rows and columns of both operands.
_STAGE = 2 * TILE * INNER * 2
_MOST_STAGES = 4
_WARPS = 8

# Triton would compile a variant wherever one of these is 1 or a multiple of 16.
_ARGUMENTS = [
    "size",
    "inner",
    "tiles",
    "left_matrix",
    "left_line",
    "right_matrix",
    "right_line",
    "linear_matrix",
    "linear_row",
    "out_matrix",
    "out_row",
]


@triton.jit
def eights(x, EIGHTS: tl.constexpr):
    """``x``; with EIGHTS the compiler sees that it is a multiple of 8."""
    if EIGHTS:
        x = x // 8 * 8
    return x


@triton.jit
def _place(tiles, GROUP: tl.constexpr):
    """This program's row and column of tiles: down the rows of a group first."""
    program = tl.program_id(0)
    in_group = GROUP * tiles
    first = program // in_group * GROUP
    rows = tl.minimum(tiles - first, GROUP)
    within = program % in_group
    return first + within % rows, within // rows


@triton.jit(do_not_specialize=_ARGUMENTS)
def symmetric_kernel(
    left,
    right,
    linear,
    out,
    beta,
    alpha,
    size,
    inner,
    tiles,
    left_matrix,
    left_line,
    right_matrix,
    right_line,
    linear_matrix,
    linear_row,
    out_matrix,
    out_row,
    HAS_LINEAR: tl.constexpr,
    LEFT_BY_ROWS: tl.constexpr,
    RIGHT_BY_ROWS: tl.constexpr,
    EIGHTS: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    TILE: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of one matrix, and its mirror image.

    ``left`` is ``(size, inner)``, by rows or by columns (``left_line`` is the stride of
    a line); ``right`` is ``(inner, size)``.
    """
    tile_row, tile_col = _place(tiles, GROUP)
    if tile_col > tile_row:
        return
    matrix = tl.program_id(1).to(tl.int64)
    size = eights(size, EIGHTS)
    left += matrix * eights(left_matrix, EIGHTS)
    right += matrix * eights(right_matrix, EIGHTS)
    left_line = eights(left_line, EIGHTS).to(tl.int64)
    right_line = eights(right_line, EIGHTS).to(tl.int64)
    row = tile_row * TILE + tl.arange(0, TILE)
    col = tile_col * TILE + tl.arange(0, TILE)
    # Rows past the end are read from the start, and not stored.
    read_row = row % size
    read_col = col % size
    if EIGHTS:
        read_row = tl.max_contiguous(tl.multiple_of(read_row, 8), 8)
        read_col = tl.max_contiguous(tl.multiple_of(read_col, 8), 8)
    at = tl.arange(0, INNER)
    if LEFT_BY_ROWS:
        left_at = left + read_row[:, None] * left_line + at[None, :]
        left_step = INNER
    else:
        left_at = left + read_row[:, None] + at[None, :] * left_line
        left_step = left_line * INNER
    if RIGHT_BY_ROWS:
        right_at = right + at[:, None] * right_line + read_col[None, :]
        right_step = right_line * INNER
    else:
        right_at = right + at[:, None] + read_col[None, :] * right_line
        right_step = INNER
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, inner, INNER):
        if EVEN_INNER:
            rows = tl.load(left_at)
            cols = tl.load(right_at)
        else:
            here = at < inner - start
            rows = tl.load(left_at, mask=here[None, :], other=0.0)
            cols = tl.load(right_at, mask=here[:, None], other=0.0)
        total = tl.dot(rows, cols, total)
        left_at += left_step
        right_at += right_step
    total = total * alpha
    inside = (row < size)[:, None]
    if HAS_LINEAR:
        linear += matrix * eights(linear_matrix, EIGHTS)
        linear_row = eights(linear_row, EIGHTS).to(tl.int64)
        linear_at = linear + row[:, None] * linear_row + col[None, :]
        added = tl.load(linear_at, mask=inside & (col < size)[None, :], other=0.0)
        total += beta * added.to(tl.float32)
    made = total.to(out.dtype.element_ty)
    mirrored = tl.trans(made)
    out += matrix * eights(out_matrix, EIGHTS)
    out_row = eights(out_row, EIGHTS).to(tl.int64)
    out_at = out + row[:, None] * out_row + col[None, :]
    mirror_at = out + col[:, None] * out_row + row[None, :]
    mirror_inside = (row < size)[None, :]
    if tile_row == tile_col:
        tl.store(out_at, made, mask=inside & (row[:, None] >= col[None, :]))
        above = col[:, None] < row[None, :]
        tl.store(mirror_at, mirrored, mask=mirror_inside & above)
    else:  # whole rows of eight, which are stored at once
        tl.store(out_at, made, mask=inside)
        tl.store(mirror_at, mirrored, mask=mirror_inside)


def launch_symmetric(
    left: Tensor,
    right: Tensor,
    linear: Tensor | None,
    out: Tensor,
    *,
    beta: float,
    alpha: float,
    shared_memory: int = 0,
) -> None:
    """``out = beta·linear + alpha·left@right``, of matrices or of batches of them.

    Args:
        left: ``(m, n)`` or ``(k, m, n)``, bf16 or fp16; rows or columns are contiguous.
        right: ``(n, m)`` or ``(k, n, m)``, likewise; the product is symmetric.
        linear: ``(m, m)`` or ``(k, m, m)`` and symmetric, with contiguous rows; or
            None.
        out: like ``linear``; shares no memory with the others.
        shared_memory: bytes of it that a block can have; 0: what this device has.
    """
    shared_memory = shared_memory or _shared_memory(out.get_device())
    left = _batch(left)
    right = _batch(right)
    out = _batch(out)
    added = out if linear is None else _batch(linear)
    for square in (added, out):
        if square.stride(2) != 1:
            raise ValueError(f"rows of a square are not contiguous: {square.stride()}")
    count, size, inner = left.shape
    left_line, left_by_rows = _lines(left)
    right_line, right_by_rows = _lines(right)
    numbers = [
        left.stride(0),
        left_line,
        right.stride(0),
        right_line,
        added.stride(0),
        added.stride(1),
        out.stride(0),
        out.stride(1),
    ]
    every = (left, right, added, out)
    eights = all(number % 8 == 0 for number in [*numbers, size, inner])
    eights = eights and all(tensor.data_ptr() % 16 == 0 for tensor in every)
    tiles = triton.cdiv(size, TILE)
    options: dict[str, Any] = {
        "num_warps": _WARPS,
        "num_stages": min(_MOST_STAGES, shared_memory // _STAGE),
        "enable_fp_fusion": False,
    }
    symmetric_kernel[(tiles * tiles, count)](
        *every,
        beta,
        alpha,
        size,
        inner,
        tiles,
        *numbers,
        HAS_LINEAR=linear is not None,
        LEFT_BY_ROWS=left_by_rows,
        RIGHT_BY_ROWS=right_by_rows,
        EIGHTS=eights,
        EVEN_INNER=inner % INNER == 0,
        TILE=TILE,
        INNER=INNER,
        GROUP=GROUP,
        **options,
    )


def _batch(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x[None]


def _lines(x: Tensor) -> tuple[int, bool]:
    """The stride of a batch's rows and True; of its columns and False where these are
    contiguous.
    """
    if x.stride(2) == 1:
        return x.stride(1), True
    if x.stride(1) != 1:
        raise ValueError(f"neither rows nor columns are contiguous: {x.stride()}")
    return x.stride(2), False


@cache
def _shared_memory(device: int) -> int:
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    most: int = properties["max_shared_mem"]
    return most
