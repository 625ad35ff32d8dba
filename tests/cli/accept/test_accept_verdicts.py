"""Each test of tests/gpu fails where what it looks at is wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_muon.settings.config import MuonConfig
from support import ROOT
from support.gpu import bits
from support.gpu.training import faults

CPU = torch.device("cpu")
FP32 = MuonConfig(ns_dtype="fp32", ns_iteration="standard")
ALL = bits.Bits((bits.Elementwise("foreach", ()),), (), ())


def module_of(name: str) -> ModuleType:
    path = ROOT / "tests" / "gpu" / f"test_gpu_{name}.py"
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ignored(*args: Any, **words: Any) -> None:
    """Of what a test reports, or of its question for a GPU."""


def test_newton_schulz_that_rounds_too_much_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    good = tuple(bits.errors(CPU, FP32))
    own = bits.orthogonalize

    def as_tf32(matrix: Tensor, config: MuonConfig) -> Tensor:
        return own(matrix, config) * (1 + 2.0**-10)

    monkeypatch.setattr(bits, "orthogonalize", as_tf32)
    bad = tuple(bits.errors(CPU, FP32))
    body = module_of("bits").test_its_error_to_float64_is_bounded
    body(bits.name_of(FP32), bits.Bits((), good, ()), ignored)
    with pytest.raises(AssertionError):
        body(bits.name_of(FP32), bits.Bits((), bad, ()), ignored)


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


@pytest.mark.parametrize(
    ("file", "test", "good", "bad"),
    [
        ("sanitizer", "no_race_in_two_steps", [("", "race")], [("race", "not tried")]),
        ("sanitizer", "a_planted_race_is_found", [("", "race")] * 2, [("", "race"), ("", "")]),
        ("bits", "the_same_matrix_twice_gives_the_same_bits", ALL, bits.Bits((), (), ("differ",))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_on_a_rank_fails(file: str, test: str, good: Any, bad: Any) -> None:
    body = getattr(module_of(file), f"test_{test}")
    others = [ignored] * (body.__code__.co_argcount - 1)
    body(good, *others)
    with pytest.raises(AssertionError):
        body(bad, *others)


def test_other_bits_than_a_cpus_fail() -> None:
    body = module_of("bits").test_momentum_norm_and_update_have_a_cpus_bits
    body("foreach", ALL, ignored, ignored)
    bad = bits.Bits((bits.Elementwise("foreach", ("momentum",)),), (), ())
    with pytest.raises(AssertionError):
        body("foreach", bad, ignored, ignored)


def test_a_rank_that_is_not_killed_or_differs_fails(tmp_path: Path) -> None:
    checkpoint = module_of("checkpoint")
    killed, found = checkpoint.test_a_rank_is_killed_during_a_save, "rank 0 died, exit code -9"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "first" / "metadata.json").touch()
    (tmp_path / "second" / "shard").touch()
    killed((tmp_path, found), ignored)
    with pytest.raises(AssertionError):
        killed((tmp_path, "rank 0 failed: no"), ignored)
    (tmp_path / "second" / "metadata.json").touch()
    with pytest.raises(AssertionError):
        killed((tmp_path, found), ignored)
    loaded = checkpoint.test_a_new_set_of_ranks_finds_that
    loaded("bits", [{"bits": "ok"}] * 2)
    with pytest.raises(AssertionError):
        loaded("bits", [{"bits": "ok"}, {"bits": "3 differ"}])
