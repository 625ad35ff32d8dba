"""``python -m support.kernels.first_step``: what a run compiles when its optimizer is
built.

Prints how many variants the trials compile, and that a step of every layout compiles
none. With ``busy SEED`` the cache's folder refuses some files, as a shared one does,
and the trials go on. No GPU is needed, see ``compiling``.
"""

from __future__ import annotations

import errno
import os
import random
import sys
from typing import Any

import torch
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction

from megatron_muon import MuonConfig
from megatron_muon.orthogonalize import normalization
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.rules import fused
from support.kernels.compiling import without_gpu

# (rows, cols, column parts, column blocks) of a matrix
LAYOUTS = (
    (96, 4096, 1, 1),
    (4096, 96, 1, 1),
    (64, 1024, 4, 1),
    (48, 2048, 2, 2),
    (128, 16, 1, 1),
    (24, 1408, 8, 1),
    (7, 130, 1, 1),
    (1, 1030, 1, 1),
    (40, 33, 1, 1),
)
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


def compiled(work: Any) -> set[str]:
    """Hashes of what is launched meanwhile, which is only compiled."""
    made: set[str] = set()

    def launch(self: Any, grid: Any) -> Any:
        return lambda *args, **options: made.add(
            f"{self.fn.__name__} {self.warmup(*args, grid=grid, **options).hash}"
        )

    JITFunction.__getitem__ = launch
    work()
    return made


def step_of(numerics: Numerics, rows: int, cols: int, parts: int, blocks: int) -> None:
    """Matrices of one layout are divided by their norms, as ``newton_schulz`` views
    them.
    """
    for count, start in ((1, 0), (5, rows * cols)):
        staged = torch.zeros(start + count * rows * cols, dtype=torch.bfloat16)[start:]
        cut = staged.view(count, parts, rows, blocks, cols // (parts * blocks))
        source = cut.permute(0, 2, 3, 1, 4)
        first = torch.empty(
            (count, rows, cols), dtype=fused.TORCH_DTYPE[numerics.dtype]
        )
        into = torch.unflatten(first, 2, source.shape[2:])
        moves = torch.ones(count, dtype=torch.bool)
        normalization.enter_by_kernels(into, source, moves, 1.0)
        normalization.enter_by_kernels(source.view(first.dtype), source, moves, 1.0)


def main() -> None:
    without_gpu(90)
    numerics = Numerics(MuonConfig(), "cuda")
    if sys.argv[1:2] == ["busy"]:
        _DRAWN.seed(int(sys.argv[2]))
        os.environ["TRITON_CACHE_MANAGER"] = "support.kernels.first_step:BusyCache"
        made = compiled(
            lambda: fused._patiently(lambda: fused.trial(fused.Fused(), CPU, numerics))
        )
        print(f"{len(REFUSED)} refused, {len(made)} variants")
        return
    for layouts in (LAYOUTS, *((each,) for each in LAYOUTS)):
        widths = {cols // (parts * blocks) for _, cols, parts, blocks in layouts}
        tried = compiled(lambda w=widths: fused.trial(fused.Fused(), CPU, numerics, w))
        stepped = compiled(
            lambda every=layouts: [step_of(numerics, *each) for each in every]
        )
        assert stepped <= tried, (layouts, stepped - tried)
        print(
            f"{len(tried)} variants are tried, {len(stepped)} of them in a step: "
            f"{layouts}"
        )


if __name__ == "__main__":
    from support.kernels import first_step

    first_step.main()
