"""The figures of ``figures.scale.split_matrices``: a matrix on several ranks, priced."""

from __future__ import annotations

import pytest

from figures.scale.split_matrices import shared
from megatron_muon.config import MuonConfig
from megatron_muon.pricing.kernels import newton_schulz
from megatron_muon.pricing.presets import H100


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sharing_pays_for_a_long_matrix_and_not_for_a_square_one(dtype: str) -> None:
    config = MuonConfig(ns_dtype=dtype)  # type: ignore[arg-type]
    for shape, pays in (((28672, 4096), True), ((4096, 4096), False)):
        whole = newton_schulz(H100, *shape, 1, config, "cuda_symmetric").seconds
        priced = [shared(H100, *shape, ranks, config) for ranks in (2, 8)]
        assert all(0 < one.replicated < one.by_rows for one in priced)
        assert (min(one.replicated for one in priced) < 0.8 * whole) == pays
