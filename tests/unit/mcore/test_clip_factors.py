"""QK-Clip's factors."""

from __future__ import annotations

import math

import torch

from megatron_muon.mcore.qk_clip.factors import eta_of


def test_a_head_of_negative_or_unusable_logits_is_not_scaled() -> None:
    """Megatron's expression makes NaN of the weights of the first and zeros of the
    second's.
    """
    inf, nan = math.inf, math.nan
    found = eta_of(torch.tensor([-5.0, inf, nan, -inf, 400.0]), 5, 100.0)
    assert found.tolist() == [1, 1, 1, 1, 0.25]
