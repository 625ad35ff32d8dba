"""What tests of tests/gpu look at is seen where it is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_muon.settings.config import MuonConfig
from support.gpu import bits
from support.gpu.training import faults

CPU = torch.device("cpu")
FP32 = MuonConfig(ns_dtype="fp32", ns_iteration="standard")


def test_newton_schulz_that_rounds_too_much_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(error.here <= error.bound for error in bits.errors(CPU, FP32))
    own = bits.orthogonalize

    def as_tf32(matrix: Tensor, config: MuonConfig) -> Tensor:
        return own(matrix, config) * (1 + 2.0**-10)

    monkeypatch.setattr(bits, "orthogonalize", as_tf32)
    assert not any(error.here <= error.bound for error in bits.errors(CPU, FP32))


def test_another_result_for_the_same_matrix_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bits.twice(CPU, FP32) == ""
    own, calls = bits.orthogonalize, iter(range(9))
    monkeypatch.setattr(bits, "orthogonalize", lambda x, config: own(x, config) + next(calls))
    assert "two results" in bits.twice(CPU, FP32)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([[6.2, 4.2], [6.2, 4.2]], ""),
        ([[6.2, 6.1], [6.2, 6.1]], "more than 0.75 of the first loss is left"),
        ([[6.2, float("nan")]] * 2, "a loss is not finite"),
        ([[6.2, 4.2], [6.2, 4.1]], "ranks have other losses"),
    ],
)
def test_a_loss_that_does_not_fall_is_seen(losses: list[list[float]], said: str) -> None:
    assert faults(losses).startswith(said) and bool(faults(losses)) == bool(said)
