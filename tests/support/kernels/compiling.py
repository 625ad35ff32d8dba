"""``python -m support.kernels.compiling 80 90``: compiles all launches with the triton on the path.

The launches are the package's own, compiled for each of these capabilities. No GPU is needed: a
stand-in for triton's driver names one, and ``warmup`` compiles in place of the launch.
"""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron_muon.orthogonalize import normalization_kernels as norms
from megatron_muon.runtime import fused_kernels as fused

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MADE: list[Any] = []


def compile_without_gpu(capability: int) -> None:
    """Make each later launch only compile, for this capability."""
    stand_in = SimpleNamespace(
        get_current_device=lambda: capability,  # compiled kernels are kept by device
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    driver.set_active(stand_in)
    JITFunction.__getitem__ = lambda self, grid: (
        lambda *args, **options: MADE.append(self.warmup(*args, grid=grid, **options))
    )


def launch() -> None:
    """Each kernel in all dtypes that a run can have."""
    rows, blocks = torch.zeros((6, 3), dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    for grad, into, nesterov in itertools.product((FP32, BF16), (FP32, BF16), (True, False)):
        fused.launch_momentum(
            *(rows, blocks, torch.zeros(3)),
            **{"grad": grad, "into": into, "momentum": 0.95, "nesterov": nesterov},
        )
    for direction in (FP32, BF16, FP16):
        fused.launch_update(rows, blocks, torch.zeros(6), direction=direction)
    for source, into in ((BF16, FP16), (BF16, BF16), (FP32, FP32)):
        x = torch.zeros((2, 64, 1, 1, 2048), dtype=source)
        for moves in (None, torch.ones(2, dtype=torch.bool)):
            norms.launch_divide(
                x, torch.zeros_like(x, dtype=into), norms.launch_norms(x, moves, 1.0)
            )


def main() -> None:
    """Print a line for each capability: the number of launches, and their kernels."""
    for capability in map(int, sys.argv[1:]):
        MADE.clear()
        compile_without_gpu(capability)
        launch()
        assert all(each.asm["cubin"] for each in MADE)
        names = " ".join(sorted({each.metadata.name for each in MADE}))
        print(f"triton {triton.__version__} sm_{capability}: {len(MADE)} launches of {names}")


if __name__ == "__main__":
    main()
