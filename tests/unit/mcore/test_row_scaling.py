"""QK-Clip's factors, and rows that are scaled by them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.mcore.qk_clip.factors import eta_of
from megatron_muon.mcore.qk_clip.row_scaling import scale_rows


@given(
    rows=st.integers(1, 5),
    cols=st.integers(1, 4),
    cut=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_range_is_scaled_as_in_the_whole(
    rows: int, cols: int, cut: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows * cols)
    whole = torch.randn(rows, cols, generator=generator).to(dtype)
    factors = torch.rand(rows, generator=generator)
    start, stop = sorted(min(at, rows * cols) for at in cut)
    piece = whole.view(-1)[start:stop].clone()
    scale_rows(piece, start, cols, factors)
    expected = (whole.float() * factors[:, None]).to(dtype).view(-1)[start:stop]
    assert torch.equal(piece, expected)


def test_a_head_of_negative_or_unusable_logits_is_not_scaled() -> None:
    """Megatron's expression makes NaN of the weights of the first and zeros of the
    second's.
    """
    inf, nan = math.inf, math.nan
    found = eta_of(torch.tensor([-5.0, inf, nan, -inf, 400.0]), 5, 100.0)
    assert found.tolist() == [1, 1, 1, 1, 0.25]
