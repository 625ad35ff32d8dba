"""``TRITON_INTERPRET=1 python -m support.kernels.interpreted_norms``: matrices over
their norms.

They are compared with exact numbers, in every layout in which they come and go; see
``interpreted`` for what the interpreter is.
"""

from __future__ import annotations

import itertools
from typing import get_args

import torch
from triton.runtime import interpreter

from megatron_muon.orthogonalize import normalization
from megatron_muon.orthogonalize.normalization import enter_by_kernels
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.settings.coefficients import NsDtype
from megatron_muon.settings.config import MuonConfig
from support.kernels.interpreted import as_torch_casts

# (matrices, rows, column blocks, column parts, width)
SHAPES = (
    (1, 1, 1, 1, 1),
    (3, 5, 1, 1, 7),
    (2, 9, 1, 1, 1024),
    (1, 17, 1, 1, 2051),
    (2, 300, 1, 2, 33),
    (1, 70, 2, 4, 130),
    (2, 8200, 1, 1, 3),
)
KINDS = (
    (torch.bfloat16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32,) * 2,
)
EXPONENTS = (-130, -126, -70, 0, 90, 125)


def staged(x: torch.Tensor) -> torch.Tensor:
    """The same matrices, whose parts lie one after another in memory."""
    return x.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)


def case(
    shape: tuple[int, ...], exponent: int, kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    """Entries are whole multiples of the scale's smallest, so that none is rounded by
    it.
    """
    generator = torch.Generator().manual_seed(sum(shape))
    numbers = torch.randint(-15, 16, shape, generator=generator).double()
    numbers[0, 0] = 1.0  # no matrix is zero
    source = staged((numbers * 2.0 ** (exponent - 3)).to(kinds[0]))
    assert source.double().equal(numbers * 2.0 ** (exponent - 3))
    scale = 128.0 if kinds[1] == torch.float16 else 1.0
    moves = torch.arange(shape[0]) != 1
    into = torch.full(shape, torch.nan, dtype=kinds[1])
    if shape[0] > 1:
        source[-1] = 0.0
    enter_by_kernels(into, source, moves, scale)
    norms = numbers.flatten(1).norm(dim=1).view(-1, 1, 1, 1, 1)
    exact = scale * numbers / norms
    if shape[0] > 1:
        exact[-1] = exact[1] = 0.0
    # rounded once; the norm's own error is that of a sum by halves in fp32
    bound = (
        torch.finfo(kinds[1]).eps * exact.abs() / 2 + 2.0**-20 * exact.abs() + 2.0**-25
    )
    far = (into.double() - exact).abs() > bound
    said = (shape, exponent, kinds, into[far][:4].tolist(), exact[far][:4].tolist())
    assert not far.any(), said
    alone = torch.full((1, *shape[1:]), torch.nan, dtype=kinds[1])
    enter_by_kernels(alone, source[:1].contiguous(), None, scale)
    if shape[3] == 1:  # the same tiles
        assert alone[0].equal(into[0])
    bad = source.clone(memory_format=torch.preserve_format)
    bad[0, 0, 0, 0, 0] = torch.inf if exponent else torch.nan
    norms = enter_by_kernels(torch.empty_like(into), bad, None, scale)
    assert norms.isnan().tolist() == [True] + [False] * (shape[0] - 1), (
        shape,
        exponent,
        kinds,
    )
    if kinds[0].itemsize == kinds[1].itemsize and shape[2:4] == (1, 1):  # in place
        enter_by_kernels(source.view(kinds[1]), source, moves, scale)
        assert source.view(kinds[1]).equal(into)


def main() -> None:
    interpreter._convert_float = as_torch_casts
    for ns_dtype in get_args(NsDtype):
        numerics = Numerics(MuonConfig(ns_dtype=ns_dtype))
        trials = [
            normalization.trial(torch.device("cpu"), numerics, by_kernels=by_kernels)
            for by_kernels in (True, False)
        ]
        assert torch.equal(*trials), ns_dtype
    cases = [
        (shape, exponent, KINDS[number % 3])
        for number, (shape, exponent) in enumerate(
            itertools.product(SHAPES[:3], EXPONENTS)
        )
    ]
    cases += itertools.product(SHAPES[3:], (0,), KINDS)
    for each in cases:
        case(*each)
    print(f"{len(cases)} cases agree")


if __name__ == "__main__":
    main()
