"""fp8 tensors, as far as parameters in fp8 need them: no products.

They have one scale each, one for each block of 128 × 128 elements, or (MXFP8) one for
each 32 elements of a row and, for products with the transposed matrix, of a column.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.te_on_cpu.products import DTYPES

_E5M2 = 8  # of ``DType``
_BLOCK = 128
_MX = 32


def _torchs(dtype: Any) -> torch.dtype:
    """Torch's dtype of one of Transformer Engine's for fp8."""
    return torch.float8_e5m2 if int(dtype) == _E5M2 else torch.float8_e4m3fn


def quantize(source: Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    """``source`` as the quantizer's kind of tensor: by its scale, or by the scale that
    fits now.
    """
    dtype = _torchs(quantizer.dtype)
    most = torch.finfo(dtype).max
    if type(quantizer).__name__ == "Float8BlockQuantizer":
        return _quantize_blocks(source, quantizer, out, most)
    if type(quantizer).__name__ == "MXFP8Quantizer":
        return _quantize_mx(source, quantizer, out, dtype)
    scale = _scale(source, quantizer, most)
    data = (
        (source.detach().float() * scale).clamp(-most, most).to(dtype).view(torch.uint8)
    )
    if out is None:
        out = quantizer.create_tensor_from_data(
            data, source.dtype, internal=quantizer.internal
        )
    else:
        out._data.copy_(data.view_as(out._data))
    if out._scale_inv is None:
        out._scale_inv = torch.empty(1)
    out._scale_inv.view(1).copy_(1 / scale)
    return out


def _scale(source: Tensor, quantizer: Any, most: float) -> Tensor:
    amax = source.detach().abs().max().float() if source.numel() else torch.zeros(())
    kind = type(quantizer).__name__
    if kind == "Float8Quantizer":  # delayed scaling
        if quantizer.amax.numel():
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
        scale: Tensor = quantizer.scale.view(())
        return scale
    if kind == "Float8CurrentScalingQuantizer":  # tensorwise
        return most / amax if amax > 0 else torch.ones(())
    raise NotImplementedError(f"quantize with {kind} is not in the stub")


def _quantize_blocks(source: Tensor, quantizer: Any, out: Any, most: float) -> Any:
    out = _empty(quantizer, source) if out is None else out
    if out._columnwise_data is not None:  # made of the rows' when it is needed
        out.update_usage(rowwise_usage=True, columnwise_usage=False)
    cols = source.shape[-1]
    rows = source.numel() // cols
    amax = torch.zeros_like(out._rowwise_scale_inv)
    fp8_block_scaling_compute_partial_amax(source, amax, rows, cols, 0, _BLOCK)
    scale = torch.empty_like(amax)
    lists = [[amax], [scale], [out._rowwise_scale_inv]]
    pow_2, epsilon = quantizer.force_pow_2_scales, quantizer.amax_epsilon
    multi_tensor_compute_scale_and_scale_inv(
        0, torch.zeros(1), lists, most, pow_2, epsilon
    )
    data, kind = out._rowwise_data.view(-1), quantizer.dtype
    fp8_block_scaling_partial_cast(source, data, scale, rows, cols, 0, _BLOCK, kind)
    return out


def _empty(quantizer: Any, like: Tensor) -> Any:
    """A tensor with blocks; of square ones Python makes the columns' data from the
    rows'.
    """
    (rows, cols), options = like.shape, dict[str, Any]()
    bytes_, turned, turned_scales = (
        torch.empty(like.shape, dtype=torch.uint8),
        None,
        None,
    )
    if type(quantizer).__name__ == "MXFP8Quantizer":
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor as kind

        options["with_gemm_swizzled_scales"] = False
        scales = _padded(rows, 128, cols // _MX, 4)
        turned = torch.empty_like(bytes_)
        turned_scales = _padded(rows // _MX, 4, cols, 128)
    else:
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
            Float8BlockwiseQTensor as kind,
        )

        options["is_2D_scaled"] = quantizer.block_scaling_dim == 2
        scales = torch.empty(quantizer.get_scale_shape(like.shape, False))
    return kind(
        shape=like.shape,
        dtype=like.dtype,
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        rowwise_data=bytes_,
        rowwise_scale_inv=scales,
        columnwise_data=turned,
        columnwise_scale_inv=turned_scales,
        **options,
    )


def _padded(rows: int, to: int, cols: int, cols_to: int) -> Tensor:
    return torch.empty(
        -(-rows // to) * to, -(-cols // cols_to) * cols_to, dtype=torch.uint8
    )


def _quantize_mx(source: Tensor, quantizer: Any, out: Any, dtype: torch.dtype) -> Any:
    out = _empty(quantizer, source) if out is None else out
    values = source.detach().float()
    most = torch.finfo(dtype).max
    for data, scale_inv, turned in (
        (out._rowwise_data, out._rowwise_scale_inv, False),
        (out._columnwise_data, out._columnwise_scale_inv, True),
    ):
        if data is None:
            continue
        groups = (values.T if turned else values).unflatten(1, (-1, _MX))
        least = torch.tensor(2.0**-126)
        power = torch.log2((groups.abs().amax(2) / most).maximum(least)).ceil()
        scaled = (groups / torch.exp2(power)[..., None]).clamp(-most, most).flatten(1)
        data.copy_((scaled.T if turned else scaled).to(dtype).view(torch.uint8))
        scales = power.T if turned else power
        scale_inv.zero_()
        scale_inv[: scales.shape[0], : scales.shape[1]] = (scales + 127).to(torch.uint8)
    return out


def _blocks(elements: int, cols: int, start: int, scales: Tensor) -> Tensor:
    """Which of the ``scales`` each of a weight's elements from ``start`` on has."""
    at = torch.arange(start, start + elements)
    return at // cols // _BLOCK * scales.shape[1] + at % cols // _BLOCK


def fp8_block_scaling_compute_partial_amax(
    source: Tensor, amax: Tensor, rows: int, cols: int, start: int, block: int
) -> None:
    """The largest magnitude that a part of a weight has in each block; 0 where it has
    nothing.
    """
    flat = source.detach().abs().float().view(-1)
    index = _blocks(flat.numel(), cols, start, amax)
    amax.copy_(
        torch.zeros(amax.numel()).scatter_reduce_(0, index, flat, "amax").view_as(amax)
    )


def fp8_block_scaling_partial_cast(
    source: Tensor,
    out: Tensor,
    scale: Tensor,
    rows: int,
    cols: int,
    start: int,
    block: int,
    kind: Any,
) -> None:
    """A part of a weight in fp8, by the scales of its blocks."""
    dtype = _torchs(kind)
    flat = source.detach().float().view(-1)
    most = torch.finfo(dtype).max
    scaled = flat * scale.view(-1)[_blocks(flat.numel(), cols, start, scale)]
    out.copy_(scaled.clamp(-most, most).to(dtype).view(torch.uint8).view_as(out))


def dequantize(source: Any, dtype: Any) -> Tensor:
    """Its values, in fp32 and then rounded to ``dtype``."""
    kind = _torchs(source._fp8_dtype)
    if hasattr(source, "_rowwise_data"):  # MXFP8; the blockwise class has Python for it
        groups = source._rowwise_data.view(kind).float().unflatten(1, (-1, _MX))
        powers = (
            source._rowwise_scale_inv[: groups.shape[0], : groups.shape[1]].float()
            - 127
        )
        return (
            (groups * torch.exp2(powers)[..., None]).flatten(1).to(DTYPES[int(dtype)])
        )
    return (source._data.view(kind).float() * source._scale_inv).to(DTYPES[int(dtype)])


def create_empty_quantized_tensor(
    quantizer: Any, shape: Any, dtype: Any, device: Any, pin_memory: bool = False
) -> Any:
    """Zeros, by the same way."""
    return quantize(torch.zeros(shape, dtype=dtype), quantizer)


def fp8_transpose(data: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:
    """Bytes of the transposed matrix."""
    turned = data.reshape(-1, data.shape[-1]).t().contiguous()
    return turned if out is None else out.copy_(turned)


def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    """The largest magnitude."""
    amax.copy_(tensor.detach().abs().max().float().view_as(amax))


def multi_tensor_compute_scale_and_scale_inv(
    chunk: int, noop: Tensor, lists: Any, most: float, pow_2: bool, epsilon: float
) -> None:
    """Scales that bring the largest magnitudes to ``most``."""
    for amax, scale, scale_inv in zip(*lists, strict=True):
        value = torch.where(amax > 0, most / amax.clamp_min(epsilon), 1.0)
        scale.copy_(torch.exp2(torch.floor(torch.log2(value))) if pow_2 else value)
        scale_inv.copy_(1 / scale)
