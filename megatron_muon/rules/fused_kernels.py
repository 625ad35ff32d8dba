"""The triton source of the two fused kernels. Only ``fused`` imports it, and only for a
launch.

Both take a table of addresses, so that one launch does a whole list of slices of any
sizes at any offsets. A block does ``BLOCK`` elements of one slice. Whole blocks of
slices that begin at multiples of 16 bytes are read and written 16 bytes at a time,
others element by element.

Each product and each sum is rounded by itself: launches pass
``enable_fp_fusion=False``. Triton has it since 2.2 (triton-lang/triton#2495); its
default is True until 3.8 at least. Casts to bf16 are ``cvt.rn``. Triton's interpreter
truncates to bf16 in place of rounding, so its bits differ.

``test_fused`` runs these kernels in triton's interpreter and reads the PTX that triton
makes of them; ``tests/gpu`` runs them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a block, and its warps: 16 elements a thread.
BLOCK, WARPS = 2048, 4
LAUNCH: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}
# exponent bits of an fp32 number: all set in NaN and Inf
EXPONENT = tl.constexpr(0x7F800000)
OF_TORCH = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit(do_not_specialize=["slices"])
def momentum_kernel(
    rows,
    slice_of_block,
    moves,
    slices,
    momentum,
    GRAD: tl.constexpr,
    INTO: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """M ← μM + G; copy the input of Newton-Schulz; note slices whose gradient is not
    all zero.

    ``rows`` has rows of ``slices`` numbers: sizes, first blocks, places in ``moves``
    (-1: none), and addresses of momentum buffers, of gradients and of the copies (0:
    none). All blocks of a slice that find a gradient write the same 1, so their order
    does not matter.
    """
    block = tl.program_id(0)
    one = tl.load(slice_of_block + block)
    size = tl.load(rows + one)
    start = (block - tl.load(rows + slices + one)) * BLOCK
    place = tl.load(rows + 2 * slices + one)
    buffer_at = tl.load(rows + 3 * slices + one)
    grad_at = tl.load(rows + 4 * slices + one)
    into_at = tl.load(rows + 5 * slices + one)
    buffer = buffer_at.to(tl.pointer_type(tl.float32))
    # triton 3.0 and 3.1 take the constant's value alone
    grad = grad_at.to(tl.pointer_type(GRAD.value))
    into = into_at.to(tl.pointer_type(INTO.value))
    if (start + BLOCK <= size) & ((buffer_at | grad_at | into_at) % 16 == 0):
        buffer = tl.multiple_of(buffer, 16)
        grad = tl.multiple_of(grad, 16)
        into = tl.multiple_of(into, 16)
        is_nonzero = _advance(
            buffer, grad, into, into_at, start, size, momentum, NESTEROV, True, BLOCK
        )
    else:
        is_nonzero = _advance(
            buffer, grad, into, into_at, start, size, momentum, NESTEROV, False, BLOCK
        )
    if (place >= 0) & (is_nonzero > 0):
        tl.store(moves + place, 1.0)


@triton.jit
def _advance(
    buffer,
    grad,
    into,
    into_at,
    start,
    size,
    momentum,
    NESTEROV: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do one block; the result is above 0 if a gradient in it is not zero."""
    at = start + tl.arange(0, BLOCK)
    if WHOLE:
        g = tl.load(grad + at)
        m = tl.load(buffer + at)
    else:
        here = at < size
        g = tl.load(grad + at, mask=here, other=0.0)
        m = tl.load(buffer + at, mask=here, other=0.0)
    g = g.to(tl.float32)
    m = m * momentum + g
    out = m
    if NESTEROV:
        out = m * momentum + g
    if WHOLE:
        tl.store(buffer + at, m)
    else:
        tl.store(buffer + at, m, mask=at < size)
    if into_at != 0:
        if WHOLE:
            tl.store(into + at, out.to(into.dtype.element_ty))
        else:
            tl.store(into + at, out.to(into.dtype.element_ty), mask=at < size)
    return tl.max((g != 0.0).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["slices"])
def update_kernel(
    rows,
    slice_of_block,
    factors,
    slices,
    DIRECTION: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """W ← keep·W - factor·direction; nothing where the slice's direction begins with
    NaN or Inf. With CAUTIOUS ``keep`` is 1 where the two signs differ.

    ``rows`` has rows of ``slices`` numbers: sizes, first blocks, addresses of main
    parameters and of directions. ``factors`` has a factor for each slice, then a
    ``keep`` for each: 1 - lr·λ.
    """
    block = tl.program_id(0)
    one = tl.load(slice_of_block + block)
    size = tl.load(rows + one)
    start = (block - tl.load(rows + slices + one)) * BLOCK
    param_at = tl.load(rows + 2 * slices + one)
    direction_at = tl.load(rows + 3 * slices + one)
    factor = tl.load(factors + one)
    keep = tl.load(factors + slices + one)
    param = param_at.to(tl.pointer_type(tl.float32))
    direction = direction_at.to(tl.pointer_type(DIRECTION.value))
    first = tl.load(direction).to(tl.float32).to(tl.int32, bitcast=True)
    if (first & EXPONENT) != EXPONENT:
        if (start + BLOCK <= size) & ((param_at | direction_at) % 16 == 0):
            param = tl.multiple_of(param, 16)
            direction = tl.multiple_of(direction, 16)
            at = start + tl.arange(0, BLOCK)
            d = tl.load(direction + at).to(tl.float32)
            w = tl.load(param + at)
            keeps = _keep(w, d, keep) if CAUTIOUS else keep
            tl.store(param + at, w * keeps - d * factor)
        else:
            at = start + tl.arange(0, BLOCK)
            here = at < size
            d = tl.load(direction + at, mask=here, other=0.0).to(tl.float32)
            w = tl.load(param + at, mask=here, other=0.0)
            keeps = _keep(w, d, keep) if CAUTIOUS else keep
            tl.store(param + at, w * keeps - d * factor, mask=here)


@triton.jit
def _keep(w, d, keep):
    """``keep``, but 1 where w and d have other signs."""
    differ = ((w > 0.0) & (d < 0.0)) | ((w < 0.0) & (d > 0.0))
    return tl.where(differ, 1.0, keep)


def launch_momentum(
    rows: Tensor,
    slice_of_block: Tensor,
    moves: Tensor,
    *,
    grad: torch.dtype,
    into: torch.dtype,
    momentum: float,
    nesterov: bool,
) -> None:
    """One launch of ``momentum_kernel`` on the current stream of the current device."""
    momentum_kernel[(slice_of_block.numel(),)](
        rows,
        slice_of_block,
        moves,
        rows.size(1),
        momentum,
        GRAD=OF_TORCH[grad],
        INTO=OF_TORCH[into],
        NESTEROV=nesterov,
        BLOCK=BLOCK,
        **LAUNCH,
    )


def launch_update(
    rows: Tensor,
    slice_of_block: Tensor,
    factors: Tensor,
    *,
    direction: torch.dtype,
    cautious: bool,
) -> None:
    """One launch of ``update_kernel`` on the current stream of the current device."""
    update_kernel[(slice_of_block.numel(),)](
        rows,
        slice_of_block,
        factors,
        rows.size(1),
        DIRECTION=OF_TORCH[direction],
        CAUTIOUS=cautious,
        BLOCK=BLOCK,
        **LAUNCH,
    )
