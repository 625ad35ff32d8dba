"""Each check of ``accept`` fails where what it looks at is wrong."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import Tensor

from megatron_muon.config import MuonConfig
from megatron_muon.lab.accept.apart import Ended
from megatron_muon.lab.accept.checks import bits, checkpoint, newton_schulz, sanitizer, training
from megatron_muon.lab.accept.checks import step as step_check

CPU = torch.device("cpu")
FP32 = MuonConfig(ns_dtype="fp32", ns_iteration="standard")


def test_newton_schulz_that_rounds_too_much_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bits.newton_schulz(CPU, FP32).verdict == "ok"
    own = bits.orthogonalize

    def as_tf32(matrix: Tensor, config: MuonConfig) -> Tensor:
        return own(matrix, config) * (1 + 2.0**-10)

    monkeypatch.setattr(bits, "orthogonalize", as_tf32)
    part = bits.newton_schulz(CPU, FP32)
    assert part.verdict == "FAILED" and "not below 0.0001" in part.text


def test_another_result_for_the_same_matrix_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = bits.orthogonalize, iter(range(9))
    monkeypatch.setattr(bits, "orthogonalize", lambda x, config: own(x, config) + next(calls))
    assert "two results" in bits.twice(CPU, FP32).text


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([[6.2, 4.2], [6.2, 4.2]], ""),
        ([[6.2, 6.1], [6.2, 6.1]], "more than 0.75 of the first is left"),
        ([[6.2, float("nan")]] * 2, "a loss is not finite"),
        ([[6.2, 4.2], [6.2, 4.1]], "ranks have other losses"),
    ],
)
def test_a_loss_that_does_not_fall_fails(losses: list[list[float]], said: str) -> None:
    part = training.judged(losses)
    assert part.verdict == ("FAILED" if said else "ok") and said in part.text


@pytest.mark.parametrize(
    ("ranks", "verdicts"),
    [
        ([("", "race"), ("", "race")], ["ok", "ok"]),
        ([("race", "not tried"), ("", "race")], ["FAILED", "not run"]),
        ([("", "race"), ("", "")], ["ok", "FAILED"]),
    ],
)
def test_a_sanitizer_that_finds_nothing_planted_fails(
    ranks: list[tuple[str, str]], verdicts: list[str]
) -> None:
    assert [part.verdict for part in sanitizer.judged(ranks)] == verdicts


def test_a_rank_that_is_not_killed_or_differs_fails() -> None:
    killed = Ended(-signal.SIGKILL, None, "")
    assert checkpoint.killed([killed, Ended(1, None, "gone")]).verdict == "ok"
    assert checkpoint.killed([Ended(0, None, "")] * 2).verdict == "FAILED"
    ok, bad = Ended(0, {"bits": "ok"}, ""), Ended(0, {"bits": "3 differ"}, "")
    assert [part.verdict for part in checkpoint.after([ok, ok])] == ["ok"]
    (part,) = checkpoint.after([ok, bad])
    assert (part.verdict, part.text) == ("FAILED", "rank 1: 3 differ")
    (part,) = checkpoint.after([ok, Ended(1, None, "ValueError: no")])
    assert part.verdict == "FAILED" and "rank 1: ValueError: no" in part.text
    (part,) = checkpoint.after([ok, Ended(None, None, "")])
    assert (part.verdict, part.text) == ("FAILED", "a rank did not end in time")


def test_directions_that_are_not_finite_fail() -> None:
    row = {"dtype": "bf16", "iteration": "gram", "input": "Gaussian", "error": 0.1, "finite": True}
    assert newton_schulz.errors({"rows": [row]}).verdict == "ok"
    bad = newton_schulz.errors({"rows": [row, row | {"finite": False}]})
    assert (bad.verdict, bad.text) == ("FAILED", "not finite: bf16 gram of Gaussian")
    assert newton_schulz.errors({"rows": ["refused"]}).verdict == "FAILED"


def test_rows_that_end_with_other_weights_fail() -> None:
    result = {"run": {"backend": "nccl"}, "rows": [{"name": "a", "step_ms": {"median": 1.0}}]}
    assert [part.verdict for part in step_check.parts(0, result)] == ["ok", "ok"]
    assert [part.verdict for part in step_check.parts(1, result)] == ["FAILED", "ok"]
