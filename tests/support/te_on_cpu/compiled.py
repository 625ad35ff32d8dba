"""What stands in the place of ``transformer_engine_torch``, Transformer Engine's
compiled module.

A name that nothing here computes can be imported, compared and handed on; to call it is
an error.
"""

from __future__ import annotations

import enum
import zlib
from typing import Any

from torch import Tensor

from support.te_on_cpu.adam import (  # noqa: F401
    multi_tensor_adam,
    multi_tensor_adam_param_remainder,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
)
from support.te_on_cpu.fp8 import (  # noqa: F401
    compute_amax,
    create_empty_quantized_tensor,
    dequantize,
    fp8_block_scaling_compute_partial_amax,
    fp8_block_scaling_partial_cast,
    fp8_transpose,
    multi_tensor_compute_scale_and_scale_inv,
    quantize,
)
from support.te_on_cpu.products import (  # noqa: F401
    DTYPES,
    generic_gemm,
    te_general_grouped_gemm,
    written,
)

# The numbers are those of its C++ header: Python reads them back.
DType = enum.IntEnum(
    "DType",
    {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6}
    | {"kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10},
)
FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors",
    [
        f"GEMM{number}_{what}"
        for number in (1, 2, 3)
        for what in ("INPUT", "WEIGHT", "OUTPUT")
    ],
    start=0,
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors",
    [f"GRAD_{what}{number}" for number in (1, 2, 3) for what in ("OUTPUT", "INPUT")],
    start=0,
)


def get_num_cublas_streams() -> int:
    return 1


def get_cublasLt_version() -> int:  # this and the next are new enough for everything
    return 130000


def get_cudnn_version() -> int:
    return 91200


class _NotComputed:
    """A name of the compiled module that the stub does not compute."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__[name] = _NotComputed(f"{self._name}.{name}")
        return self.__dict__[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"transformer_engine_torch.{self._name} is not in the stub"
        )

    def __int__(self) -> int:
        return zlib.crc32(self._name.encode())

    def __repr__(self) -> str:
        return f"<transformer_engine_torch.{self._name}>"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    globals()[name] = _NotComputed(name)
    return globals()[name]


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, *given: Any
) -> tuple[Tensor, None, Tensor]:
    """The normed input, and what the backward pass needs."""
    _quantizer, dtype, _sm_margin, zero_centered = given
    wide = x.float()
    rsigma = (wide.square().mean(-1) + eps).rsqrt()
    value = wide * rsigma[..., None] * (weight.float() + float(zero_centered))
    return written(out, value, DTYPES[int(dtype)]), None, rsigma


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The normed input, and what the backward pass needs."""
    _quantizer, dtype, _sm_margin, zero_centered = given
    wide = x.float()
    mu = wide.mean(-1)
    rsigma = ((wide - mu[..., None]).square().mean(-1) + eps).rsqrt()
    gamma = weight.float() + float(zero_centered)
    value = (wide - mu[..., None]) * rsigma[..., None] * gamma + bias.float()
    return written(out, value, DTYPES[int(dtype)]), mu, rsigma


def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of gamma."""
    normed = x.float() * rsigma[..., None]
    wide = dz.float().view_as(normed)
    dy = wide * (weight.float() + float(zero_centered))
    dx = rsigma[..., None] * (dy - normed * (dy * normed).mean(-1, keepdim=True))
    rows = tuple(range(x.dim() - 1))
    return dx.to(x.dtype), (wide * normed).sum(rows).to(weight.dtype)


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, weight: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, of gamma and of beta."""
    _sm_margin, zero_centered = given
    normed = (x.float() - mu[..., None]) * rsigma[..., None]
    wide = dz.float().view_as(normed)
    dy = wide * (weight.float() + float(zero_centered))
    dx = dy - dy.mean(-1, keepdim=True) - normed * (dy * normed).mean(-1, keepdim=True)
    rows = tuple(range(x.dim() - 1))
    dgamma = (wide * normed).sum(rows)
    dbeta = wide.sum(rows)
    return (
        (dx * rsigma[..., None]).to(x.dtype),
        dgamma.to(weight.dtype),
        dbeta.to(weight.dtype),
    )
