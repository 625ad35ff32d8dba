"""Matrix products of Transformer Engine's linears, in fp32, rounded once; none in
fp8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# by the numbers of ``DType``
DTYPES = {4: torch.float32, 5: torch.float16, 6: torch.bfloat16}


def written(
    out: Tensor | None, value: Tensor, dtype: Any, accumulate: bool = False
) -> Tensor:
    """``value`` in ``out`` if there is one, else rounded to ``dtype``."""
    if out is None:
        return value.to(dtype)
    value = value.view_as(out)
    return out.add_(value) if accumulate else out.copy_(value)


def _product(a: Tensor, transa: bool, b: Tensor, transb: bool) -> Tensor:
    """cuBLAS's operands are column-major: in rows it is B · A, each transposed as
    asked.
    """
    a, b = (x.reshape(-1, x.shape[-1]).float() for x in (a, b))
    return (b.t() if transb else b) @ (a.t() if transa else a)


def generic_gemm(
    a: Tensor,
    transa: bool,
    b: Tensor,
    transb: bool,
    out: Tensor | None,
    *given: Any,
    comm_overlap: Any = None,
    alpha: float = 1.0,
    **_: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """A linear's forward, input gradient or weight gradient; the bias's gradient comes
    with it.
    """
    quantizer, out_dtype, bias, _, gelu, _, grad, _, _, accumulate, _ = given
    if quantizer is not None or gelu or comm_overlap is not None:
        raise NotImplementedError("generic_gemm with fp8, gelu or user buffers")
    value, bias_grad = alpha * _product(a, transa, b, transb), None
    if bias is not None and grad:  # b is then the output's gradient
        bias_grad = b.reshape(-1, b.shape[-1]).float().sum(0).to(bias.dtype)
    elif bias is not None:
        value = value + bias.float()
    if not transb:
        value = value.view(*b.shape[:-1], value.shape[-1])
    dtype = a.dtype if out_dtype is None else DTYPES[int(out_dtype)]
    return written(out, value, dtype, accumulate), bias_grad, None, None


def te_general_grouped_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Any, *x: Any
) -> Any:
    """One product an expert; the outputs are there."""
    _, m_splits, bias, _, single_output, _, grad, _, _, accumulate, *_ = x
    outs = out[0].split_with_sizes(list(m_splits)) if single_output else out
    for one, two, target, extra in zip(a, b, outs, bias, strict=True):
        value = _product(one, transa, two, transb)
        if grad and extra.numel():
            extra.copy_(two.float().sum(0))
        elif extra.numel():
            value = value + extra.float()
        written(target, value, None, accumulate)
    return bias
