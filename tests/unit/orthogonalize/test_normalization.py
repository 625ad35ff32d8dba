"""X = U/‖U‖ by triton's kernels: in its interpreter, and by the instructions that it
makes of them.

No GPU runs here. Both need triton; without it the tests say that they are skipped.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_muon import MuonConfig
from megatron_muon.orthogonalize import triton_operations
from megatron_muon.orthogonalize.normalization import enter_by_torch, trial
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.orthogonalize.triton_operations import takes_kernels
from support.kernels.compiled import CAPABILITIES, instructions, interpreted
from support.processes import environment

CPU_DEVICE = torch.device("cpu")
# Triton 3.5's. What they flush is below 2^-126 of the norm: the power of two is divided
# out before.
FLUSHING = {"div.rn.ftz.f32", "sqrt.rn.ftz.f32"}


def test_kernels_are_cudas_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    for has in (True, False):
        monkeypatch.setattr(triton_operations, "has_triton", lambda has=has: has)
        assert takes_kernels(cuda, Numerics(MuonConfig())) == has
        assert not takes_kernels(cuda, Numerics(MuonConfig(elementwise="foreach")))
        assert not takes_kernels(CPU_DEVICE, Numerics(MuonConfig()))


def test_the_interpreter_divides_matrices_by_their_norms() -> None:
    """Of scales whose squares are none of fp32, in all layouts, in place, zero, or not
    moving.
    """
    assert interpreted("support.kernels.interpreted_norms") >= 30


def test_the_trials_sums_are_exact_in_any_order() -> None:
    """So its bits are those of every correct norm, and another norm shows."""
    made = trial(CPU_DEVICE, Numerics(MuonConfig(ns_dtype="fp16")), by_kernels=False)
    norms = made.double().flatten(1).norm(dim=1)
    assert norms[:2].sub(128).abs().max() < 0.1 and not norms[2:].any()
    assert made[0].equal(made[1])
    numbers = torch.arange(20 * 1030).mul(7).remainder(5).sub(2).double()
    assert numbers.square().sum() < 2**24  # an integer in fp32
    source = numbers.bfloat16().view(1, 20, 1, 1, 1030)
    other = torch.empty_like(source, dtype=torch.float16)
    enter_by_torch(other, source, None, 128.0 * (1 - 2**-9))
    assert not other[0].equal(made[0])


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_each_operation_rounds_and_the_norm_once(capability: int) -> None:
    counts = instructions(capability)
    for name, count in counts.items():
        if name.startswith(("squares_kernel", "divide_kernel", "norm_kernel")):
            assert not any(
                re.match(r"fma|mad\.(rn|f32)", x) or "approx" in x for x in count
            ), name
            assert {x for x in count if "ftz" in x} <= FLUSHING, name
        if name.startswith("norm_kernel"):
            assert count["sqrt.rn.f32"] + count["sqrt.rn.ftz.f32"] == 1, name
    divide = counts["divide_kernel bf16 to fp16 in eights"]
    assert divide["div.rn.f32"] + divide["div.rn.ftz.f32"] == 32
    assert divide["cvt.rn.f16x2.f32"] or divide["cvt.rn.f16.f32"]


def _first_step(*words: str, **variables: str) -> subprocess.Popen[str]:
    pytest.importorskip("triton", reason="the kernels are triton's")
    return subprocess.Popen(
        [sys.executable, "-m", "support.kernels.first_step", *words],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_step_compiles_nothing_that_was_not_compiled_when_the_optimizer_was_built() -> (
    None
):
    """In every layout, offset and batch."""
    said, _ = _first_step().communicate(timeout=280)
    assert said.count(" variants are tried") == 10, said


@pytest.mark.slow  # 16 s of eight processes
def test_ranks_that_compile_at_once_survive_a_cache_that_refuses_files(
    tmp_path: Path,
) -> None:
    """Eight processes and one folder, whose file system says EBUSY or ESTALE now and
    then.
    """
    ranks = [
        _first_step("busy", str(n), TRITON_CACHE_DIR=str(tmp_path)) for n in range(8)
    ]
    texts = [rank.communicate(timeout=280)[0] for rank in ranks]
    found = [re.fullmatch(r"(\d+) refused, 7 variants\n", said) for said in texts]
    assert all(found), texts
    assert sum(int(each[1]) for each in found if each) >= 4
