"""The bound of Newton-Schulz's speed: a plain matmul on the same device and threads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_muon.orthogonalize.matmul import TORCH_DTYPE, fp32_is_fp32, numerics_on
from megatron_muon.settings.coefficients import NsDtype
from megatron_muon.settings.config import MuonConfig

# Rows of the matrices: on a CPU so many that more are not faster, and few enough for a product in
# every round. Measured on one thread with AVX512_BF16; not measured on a GPU.
_CPU_SIZE, _GPU_SIZE = 1024, 8192


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A product of two square matrices by torch.

    Attributes:
        left, right: matrices ``(n, n)``.
        dtype: their dtype, in which Newton-Schulz multiplies on this device: the run's, or fp32 on
            a CPU without instructions for it.
    """

    left: Tensor
    right: Tensor
    dtype: NsDtype

    @property
    def name(self) -> str:
        """The name of its row."""
        size = self.left.size(0)
        return f"matmul {size}x{size}, {self.dtype}"

    @property
    def flops(self) -> int:
        """Flops of the product, 2 per multiply-add."""
        return 2 * self.left.size(0) ** 3

    def __call__(self, _: Tensor) -> Tensor:
        """Compute the product; the argument, which every run of the bench gets, is ignored."""
        with fp32_is_fp32(self.left.device):
            return torch.mm(self.left, self.right)


def ceiling_on(device: torch.device, dtype: NsDtype) -> Ceiling:
    """The ceiling of Newton-Schulz on this device in this dtype."""
    size = _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
    held = numerics_on(device, MuonConfig(ns_dtype=dtype)).held
    numbers = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, generator=numbers, device=device, dtype=TORCH_DTYPE[held])
        for _ in range(2)
    )
    return Ceiling(left, right, held)
