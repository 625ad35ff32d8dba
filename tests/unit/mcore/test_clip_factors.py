"""The rows and factors of QK-Clip."""

from __future__ import annotations

import math

import torch

from megatron_muon.mcore.qk_clip.factors import HeadRows, eta_of

GATED = HeadRows(2, (("q", 4), ("gate", 4), ("k", 2), ("v", 2)))


def test_a_head_of_negative_or_unusable_logits_is_left_as_it_is() -> None:
    """Megatron's expression makes NaN of the weights of the first and zeros of the second's."""
    inf, nan = math.inf, math.nan
    assert eta_of(torch.tensor([-5.0, inf, nan, -inf, 400.0]), 5, 100.0).tolist() == [
        1,
        1,
        1,
        1,
        0.25,
    ]


def test_tp_ranks_have_equal_ranges_of_rows() -> None:
    assert [str(GATED.local(rank, 4)) for rank in range(4)] == [
        "[0, 6)",
        "[6, 12)",
        "[12, 18)",
        "[18, 24)",
    ]
