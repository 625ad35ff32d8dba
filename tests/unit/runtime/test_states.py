"""fp32 values as bf16 and the 16 bits that it lacks: exact, and rounded to nearest."""

from __future__ import annotations

import torch

from megatron_muon.runtime.states import of_halves, write_halves


def test_halves_are_exact_and_the_first_is_nearest_and_in_a_tie_away_from_zero() -> None:
    upper = torch.arange(-(2**15), 2**15, 7, dtype=torch.int32)[:, None] << 16  # every exponent
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    bits = (upper | lower)[upper.view(torch.float32).isfinite()[:, 0]].view(-1)
    values = bits.view(torch.float32)
    high = torch.empty(len(bits), dtype=torch.bfloat16)
    remainder = torch.empty(len(bits), dtype=torch.int16)
    write_halves(values.clone(), high, remainder)
    assert torch.equal(of_halves(high, remainder).view(torch.int32), bits)
    is_tie = bits & 0xFFFF == 0x8000
    assert torch.equal(high[~is_tie], values[~is_tie].bfloat16())
    assert (high[is_tie].float().abs() > values[is_tie].abs()).all()
