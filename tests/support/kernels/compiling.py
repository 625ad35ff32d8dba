"""``python -m support.kernels.compiling 80 90``: compiles all launches with the triton
on the path.

The launches are the package's own, compiled for each of these capabilities. No GPU is
needed: a stand-in for triton's driver names one, and ``warmup`` compiles in place of
the launch.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron_muon.orthogonalize import symmetric_kernels as symmetric
from megatron_muon.rules import fused_kernels as fused

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHARED_MEMORY = 163 << 10  # an A100's, the least of the capabilities
SHORT = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}


def without_gpu(capability: int) -> None:
    """Let triton compile for a capability."""
    stand_in = SimpleNamespace(
        get_current_device=lambda: capability,  # compiled kernels are kept by device
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    driver.set_active(stand_in)


def compiled(work: Callable[[], object]) -> list[tuple[str, Any]]:
    """The kernel of each launch meanwhile, and what triton makes of it."""
    made: list[tuple[str, Any]] = []

    def launch(self: Any, grid: Any) -> Any:
        return lambda *args, **options: made.append(
            (self.fn.__name__, self.warmup(*args, grid=grid, **options))
        )

    JITFunction.__getitem__ = launch
    work()
    return made


def all_compiled(capability: int) -> list[tuple[str, Any]]:
    """The same for a capability, of all launches, each kernel with its dtypes."""
    without_gpu(capability)
    every = []
    for words, launch in launches():
        every += [(f"{name} {words}", made) for name, made in compiled(launch)]
    return every


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each kernel in all dtypes that a run can have, of rows that start at 16 bytes or
    not.
    """
    rows = torch.zeros((6, 3), dtype=torch.int64)
    blocks = torch.zeros(4, dtype=torch.int32)
    for grad, into, nesterov in itertools.product(
        (FP32, BF16), (FP32, BF16), (True, False)
    ):
        yield (
            f"{SHORT[grad]} to {SHORT[into]}{' Nesterov' * nesterov}",
            lambda dtypes={"grad": grad, "into": into}, nesterov=nesterov: (
                fused.launch_momentum(
                    *(rows, blocks, torch.zeros(3)),
                    **dtypes,
                    momentum=0.95,
                    nesterov=nesterov,
                )
            ),
        )
    for direction, cautious in itertools.product((FP32, BF16, FP16), (False, True)):
        yield (
            f"{SHORT[direction]}{' cautious' * cautious}",
            lambda dtype=direction, cautious=cautious: fused.launch_update(
                *(rows, blocks, torch.zeros(6)), direction=dtype, cautious=cautious
            ),
        )
    for dtype, short in itertools.product((BF16, FP16), (256, 252)):
        square = torch.zeros((2, short, short), dtype=dtype)
        wide = torch.zeros((2, short, 2 * short), dtype=dtype)
        eights = " in eights" * (short % 8 == 0)
        tall = torch.zeros((2, 2 * short, short), dtype=dtype)
        for kind, left, right, linear in (
            ("XXᵀ", wide, wide.mT, None),
            ("XᵀX", tall.mT, tall, None),
            ("bS + cSS", square, square, square),
        ):
            yield (
                f"{SHORT[dtype]} {kind}{eights}",
                lambda operands=(left, right, linear, square): (
                    symmetric.launch_symmetric(
                        *operands, beta=0.5, alpha=2.0, shared_memory=SHARED_MEMORY
                    )
                ),
            )


def main() -> None:
    """Print a line for each capability: the number of launches, and their kernels; or
    with ``--instructions`` first, those of each launch in PTX.
    """
    if sys.argv[1] == "--instructions":
        form = re.compile(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]+)\s", re.M)
        every = all_compiled(int(sys.argv[2]))
        print(json.dumps({name: form.findall(made.asm["ptx"]) for name, made in every}))
        return
    for capability in map(int, sys.argv[1:]):
        made = all_compiled(capability)
        assert all(each.asm["cubin"] for _, each in made)
        names = " ".join(sorted({name.split()[0] for name, _ in made}))
        print(
            f"triton {triton.__version__} sm_{capability}: {len(made)} launches of "
            f"{names}"
        )


if __name__ == "__main__":
    main()
