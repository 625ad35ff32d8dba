"""``TRITON_INTERPRET=1 python -m support.kernels.interpreted``: fused kernels, bit by
bit.

Their results are those of foreach.

Triton's interpreter does each operation with numpy, on a CPU's memory. Its casts are
torch's here: its own cuts bf16 off in place of rounding it, and takes subnormal bf16
for other numbers in fp32 (triton 3.9). What ptxas makes of the kernels it does not
show; ``test_fused`` reads that.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from megatron_muon.rules import fused_kernels
from megatron_muon.rules.fused import Fused
from megatron_muon.rules.muon import Foreach

BLOCK = fused_kernels.BLOCK
SIZES = (1, 2, 7, 33, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5)
# Subnormals, the least normals, the largest finite numbers, halves of bf16's last
# place, zeros.
EDGES = (
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-40,
    1.1754944e-38,
    -1.1754944e-38,
    8.0e37,
    -8.0e37,
    1e-30,
    1.0,
    1.00390625,
    1.01171875,
    1.0 + 2**-23,
    -1.00390625,
    2.0**-133,
    65504.0,
)
_convert_float = interpreter._convert_float


def as_torch_casts(data: Any, source: Any, target: Any, mode: Any) -> Any:
    if (source, target) == (tl.float32, tl.bfloat16):
        made = torch.from_numpy(np.array(data, dtype=np.float32, copy=True)).to(
            torch.bfloat16
        )
        return made.view(torch.int16).numpy().view(np.uint16)
    if (source, target) == (tl.bfloat16, tl.float32):
        return (np.asarray(data).view(np.uint16).astype(np.uint32) << 16).view(
            np.float32
        )
    return _convert_float(data, source, target, mode)


class Runs:
    """Runs of random sizes in flat tensors, each beginning at any element."""

    def __init__(
        self, chance: random.Random, grad: torch.dtype, travels: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        count = chance.choice((1, 2, 5, 9))
        self.sizes = [
            chance.choice((*SIZES, chance.randint(1, 4 * BLOCK))) for _ in range(count)
        ]

        def flat(dtype: torch.dtype, scale: float) -> list[Tensor]:
            gaps = [chance.choice((0, 0, 1, 4, 8, 5)) for _ in self.sizes]
            whole = (
                torch.randn(sum(self.sizes) + sum(gaps), generator=generator) * scale
            )
            edges = torch.tensor(EDGES)[torch.randint(len(EDGES), (whole.numel(),))]
            whole = torch.where(
                torch.rand(whole.numel(), generator=generator) < 0.2, edges, whole
            )
            whole = whole.to(dtype)
            parts, start = [], 0
            for gap, size in zip(gaps, self.sizes, strict=True):
                parts.append(whole[start + gap : start + gap + size])
                start += gap + size
            return parts

        self.buffers = flat(torch.float32, 1e-3)
        self.params = flat(torch.float32, 0.02)
        self.grads = flat(grad, 1e-4)
        self.directions = flat(travels, 0.1)
        self.into: list[Tensor | None] = list(flat(travels, 7.0))
        for run in range(count):
            if chance.random() < 0.2:  # its direction is not applied
                self.directions[run][0] = chance.choice(
                    (torch.nan, torch.inf, -torch.inf)
                )
            if chance.random() < 0.3:
                self.grads[run].zero_()
                if chance.random() < 0.5:  # one element that is not
                    self.grads[run][-1] = chance.choice((1e-38, 1e-45, -1.0))
            if chance.random() < 0.3:
                self.into[run] = None
        self.moving = [run for run in range(count) if self.into[run] is not None]
        chance.shuffle(self.moving)
        self.moves = torch.full((len(self.moving),), 7.0, dtype=travels)
        self.factors = [chance.uniform(1e-5, 3e-2) for _ in self.sizes]
        decaying = chance.random() < 0.6
        self.decays = [chance.choice((0.0, 1e-4, 0.03)) * decaying for _ in self.sizes]

    def written(self) -> list[Tensor]:
        targets = [target for target in self.into if target is not None]
        return [self.moves, *self.buffers, *targets, *self.params]


def step(
    kind: Foreach,
    runs: Runs,
    momentum: float | list[float],
    nesterov: bool,
    cautious: bool,
) -> None:
    kind.advance_momentum(
        runs.buffers,
        runs.grads,
        runs.into,
        runs.moves,
        runs.moving,
        momentum=momentum,
        nesterov=nesterov,
    )
    kind.apply_updates(
        runs.params,
        [d.clone() for d in runs.directions],
        runs.factors,
        runs.decays,
        cautious=cautious,
    )


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def main() -> None:
    interpreter._convert_float = as_torch_casts
    # the compiler makes them constants, the interpreter does not
    of_torch = fused_kernels.OF_TORCH
    fused_kernels.OF_TORCH = {
        key: tl.constexpr(value) for key, value in of_torch.items()
    }
    dtypes = (torch.float32, torch.bfloat16)
    cases = 0
    for grad, travels, nesterov in itertools.product(dtypes, dtypes, (True, False)):
        for seed in range(6):
            torch.manual_seed(seed)
            name = f"{seed} {grad} {travels} {nesterov}"
            fused = Runs(random.Random(name), grad, travels)
            torch.manual_seed(seed)
            foreach = Runs(random.Random(name), grad, travels)
            kernels = Fused()
            cautious = seed % 2 == 1
            chance = random.Random(name)
            values = (0.95, 0.9, 0.0, 0.123456789)
            momentum: float | list[float] = chance.choice(values)
            if seed % 3 == 2:  # by pattern
                momentum = [chance.choice(values) for _ in fused.sizes]
            for _ in range(2):  # the second has the tables of the first
                step(kernels, fused, momentum, nesterov, cautious)
                step(Foreach(), foreach, momentum, nesterov, cautious)
            for made, expected in zip(fused.written(), foreach.written(), strict=True):
                other = (bits(made) != bits(expected)).nonzero().flatten()
                pairs = [(float(made[at]), float(expected[at])) for at in other[:4]]
                assert not pairs, (name, pairs)
            cases += 1
    print(f"{cases} cases agree")


if __name__ == "__main__":
    main()
