"""The bound of Newton-Schulz's speed: a plain matmul on the same device and threads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_muon.coefficients import NsDtype
from megatron_muon.orthogonalize.iteration import held_dtype
from megatron_muon.orthogonalize.matmul import fp32_is_fp32, plan_device, torch_dtype

# Rows: large enough that a larger one is not faster (one thread of a CPU with AVX512_BF16; a GPU's
# is not measured), small enough to be made in every round.
_CPU_SIZE, _GPU_SIZE = 1024, 8192


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A product of two square matrices, as fast as torch has it.

    Attributes:
        left, right: both ``(n, n)``.
        dtype: theirs, what Newton-Schulz multiplies in there: the run's, but fp32 on a CPU that has
            no instructions for it.
    """

    left: Tensor
    right: Tensor
    dtype: NsDtype

    @property
    def name(self) -> str:
        """The flop/s of its row."""
        size = self.left.size(0)
        return f"matmul {size}x{size}, {self.dtype}"

    @property
    def flops(self) -> int:
        """2 per multiply-add."""
        return 2 * self.left.size(0) ** 3

    def __call__(self, _: Tensor) -> Tensor:
        """The product; as a run of the bench it is given a matrix, which it has no use for."""
        with fp32_is_fp32(self.left.device):
            return torch.mm(self.left, self.right)


def ceiling_on(device: torch.device, dtype: NsDtype) -> Ceiling:
    """The ceiling of a run on this device in this dtype."""
    size = _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
    held = held_dtype(dtype, plan_device(device))
    numbers = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, generator=numbers, device=device, dtype=torch_dtype(held))
        for _ in range(2)
    )
    return Ceiling(left, right, held)
