"""The rows and factors of QK-Clip."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_muon.mcore.qk_clip.factors import HeadRows, eta_of, row_factors

GATED = HeadRows(2, (("q", 4), ("gate", 4), ("k", 2), ("v", 2)))


def test_the_largest_logit_of_a_group_scales_it() -> None:
    eta = eta_of(torch.tensor([50.0, 200.0, 99.0, 100.0]), 2, 100.0)
    assert eta.tolist() == [0.5, 1.0]


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


def test_the_dtype_of_the_logits_is_that_of_eta() -> None:
    eta = eta_of(torch.tensor([300.0], dtype=torch.bfloat16), 1, 100.0)
    assert eta.dtype is torch.bfloat16
    assert row_factors(eta, GATED_ONE, 0.5).dtype is torch.float32


GATED_ONE = HeadRows(1, (("q", 1), ("gate", 1), ("k", 1), ("v", 1)))


def test_gates_and_values_keep_their_rows() -> None:
    factors = row_factors(torch.tensor([0.25, 1.0]), GATED, 0.5)
    assert factors.tolist() == [0.5] * 4 + [1.0] * 4 + [0.5] * 2 + [1.0] * 2 + [1.0] * 12


def test_the_logit_of_a_clipped_head_is_the_threshold() -> None:
    """Queries and keys share it; a rotary key is all heads', so its query has all of the clip."""
    alpha, eta = 0.3, torch.tensor([0.1])
    queries = HeadRows(1, (("q", 1), ("rotary", 1)), is_latent=True)
    keys = HeadRows(1, (("k", 1), ("v", 1)), is_latent=True)
    query, rotary = row_factors(eta, queries, alpha).tolist()
    key, value = row_factors(eta, keys, alpha).tolist()
    assert query * key == pytest.approx(0.1) and rotary == pytest.approx(0.1) and value == 1.0
    assert query == pytest.approx(0.1**alpha)


def test_tp_ranks_have_equal_ranges_of_rows() -> None:
    assert [str(GATED.local(rank, 4)) for rank in range(4)] == [
        "[0, 6)",
        "[6, 12)",
        "[12, 18)",
        "[18, 24)",
    ]
    with pytest.raises(ValueError, match="24 rows are not 5 equal ranges"):
        GATED.local(0, 5)
