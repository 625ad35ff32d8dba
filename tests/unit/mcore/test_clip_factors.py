"""The factors of QK-Clip."""

from __future__ import annotations

import math

import torch

from megatron_muon.mcore.qk_clip.factors import eta_of


def test_a_head_of_negative_or_unusable_logits_is_left_as_it_is() -> None:
    """Megatron's expression makes NaN of the weights of the first and zeros of the second's."""
    inf, nan = math.inf, math.nan
    found = eta_of(torch.tensor([-5.0, inf, nan, -inf, 400.0]), 5, 100.0)
    assert found.tolist() == [1, 1, 1, 1, 0.25]
