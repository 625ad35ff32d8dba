"""``python -m support.kernels.first_step``: what a run compiles when its optimizer is
built.

Prints how many variants the trial compiles, and that steps of slices of any size
compile none. With ``busy SEED`` the cache's folder refuses some files, as a shared one
does, and the trial goes on. No GPU is needed, see ``compiling``.
"""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.cache import FileCacheManager

from megatron_muon import MuonConfig
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.rules import fused
from support.kernels.compiling import compiled, without_gpu

SIZES = ((1,), (16, 3, 4097), (2048, 7), (8192, 8192, 1))
CPU = torch.device("cpu")
_DRAWN = random.Random()
REFUSED: list[int] = []


class BusyCache(FileCacheManager):
    """Refuses some files with what a network's file system says."""

    def put(self, *args: Any, **kwargs: Any) -> str:
        """Write a file of the cache."""
        if _DRAWN.random() < 0.05:
            REFUSED.append(_DRAWN.choice((errno.EBUSY, errno.ESTALE)))
            raise OSError(REFUSED[-1], "refused")
        return super().put(*args, **kwargs)


def variants(work: Callable[[], object]) -> set[str]:
    """Hashes of what is launched meanwhile, which is only compiled."""
    return {f"{name} {made.hash}" for name, made in compiled(work)}


def step(
    sizes: tuple[int, ...], gradients: torch.dtype, directions: torch.dtype
) -> None:
    """A round's momentum and update, of slices of these sizes at odd offsets."""

    def slices(dtype: torch.dtype) -> list[Tensor]:
        return list(torch.zeros(1 + sum(sizes), dtype=dtype)[1:].split(sizes))

    kernels = fused.Fused()
    moves = torch.zeros(len(sizes), dtype=torch.bfloat16)
    kernels.advance_momentum(
        slices(torch.float32),
        slices(gradients),
        slices(torch.bfloat16),
        moves,
        tuple(range(len(sizes))),
        momentum=0.9,
        nesterov=True,
    )
    factors = [0.1] * len(sizes)
    kernels.apply_updates(
        slices(torch.float32), slices(directions), factors, factors, cautious=False
    )


def main() -> None:
    without_gpu(90)
    numerics = Numerics(MuonConfig(), "cuda")
    if sys.argv[1:2] == ["busy"]:
        _DRAWN.seed(int(sys.argv[2]))
        os.environ["TRITON_CACHE_MANAGER"] = "support.kernels.first_step:BusyCache"
        made = variants(
            lambda: fused._patiently(lambda: fused.trial(fused.Fused(), CPU, numerics))
        )
        print(f"{len(REFUSED)} refused, {len(made)} variants")
        return
    tried = variants(lambda: fused.trial(fused.Fused(), CPU, numerics))
    kinds = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16))
    for sizes in SIZES:
        stepped: set[str] = set()
        for kind in kinds:
            stepped |= variants(lambda kind=kind, sizes=sizes: step(sizes, *kind))
        assert stepped <= tried, (sizes, stepped - tried)
        print(f"{len(tried)} variants are tried, {len(stepped)} in a step: {sizes}")


if __name__ == "__main__":
    from support.kernels import first_step

    first_step.main()
