"""fp8 tensors with one scale each, as far as parameters in fp8 need them: no products."""

from __future__ import annotations

from typing import Any

import torch

from support.te_on_cpu.products import DTYPES

Tensor = torch.Tensor
_E5M2 = 8  # of ``DType``


def quantize(source: Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    """``source`` as the quantizer's kind of tensor: by its scale, or by the scale that fits now."""
    dtype = torch.float8_e5m2 if int(quantizer.dtype) == _E5M2 else torch.float8_e4m3fn
    most = torch.finfo(dtype).max
    scale = _scale(source, quantizer, most)
    data = (source.detach().float() * scale).clamp(-most, most).to(dtype).view(torch.uint8)
    if out is None:
        out = quantizer.create_tensor_from_data(data, source.dtype, internal=quantizer.internal)
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


def dequantize(source: Any, dtype: Any) -> Tensor:
    """Its values, in fp32 and then rounded to ``dtype``."""
    kind = torch.float8_e5m2 if int(source._fp8_dtype) == _E5M2 else torch.float8_e4m3fn
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
        value = most / amax.clamp_min(epsilon) if float(amax) else torch.ones_like(amax)
        scale.copy_(torch.exp2(torch.floor(torch.log2(value))) if pow_2 else value)
        scale_inv.copy_(1 / scale)
