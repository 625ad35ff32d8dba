"""X = U/‖U‖ by triton's kernels: in its interpreter, and by the instructions that it makes of them.

No GPU runs here. Both need triton; without it the tests say that they are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_muon import MuonConfig
from megatron_muon.orthogonalize import triton_operations
from megatron_muon.orthogonalize.normalization import enter_by_torch, trial
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.orthogonalize.triton_operations import takes_kernels
from support import ROOT, TESTS
from support.kernels.compiled import CAPABILITIES, instructions, interpreted

CPU_DEVICE = torch.device("cpu")
# Triton 3.5's. What they flush is below 2^-126 of the norm: the power of two is divided out before.
FLUSHING = {"div.rn.ftz.f32", "sqrt.rn.ftz.f32"}


def test_kernels_are_cudas_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    for has in (True, False):
        monkeypatch.setattr(triton_operations, "has_triton", lambda has=has: has)
        assert takes_kernels(cuda, Numerics(MuonConfig())) == has
        assert not takes_kernels(cuda, Numerics(MuonConfig(elementwise="foreach")))
        assert not takes_kernels(CPU_DEVICE, Numerics(MuonConfig()))


def test_the_interpreter_divides_matrices_by_their_norms() -> None:
    """Of scales whose squares are none of fp32, in all layouts, in place, zero, or not moving."""
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


def _squares(capability: int) -> Counter[str]:
    return _compiled("squares_kernel", {"source": "*bf16", "made": "*fp32"}, capability)


def _divide(capability: int) -> Counter[str]:
    pointers = {"source": "*bf16", "into": "*fp16", "divisors": "*fp32"}
    return _compiled("divide_kernel", pointers, capability)


def _compiled(
    name: str, pointers: dict[str, str], capability: int, eights: bool = True
) -> Counter[str]:
    pytest.importorskip("triton", reason="the kernels are triton's")
    from megatron_muon.orthogonalize import normalization_kernels as kernels

    kernel = getattr(kernels, name)
    tile = {"TILE_ROWS": kernels.TILE // kernels.COLUMNS, "TILE_COLS": kernels.COLUMNS}
    constants = {**tile, "EIGHTS": eights}
    numbers = [each for each in kernel.arg_names if each not in {*pointers, *constants}]
    signature = pointers | dict.fromkeys(numbers, "i32")
    return instructions(kernel, signature, constants, kernels.LAUNCH, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_matrices_are_read_16_bytes_at_a_time_and_each_operation_rounds(capability: int) -> None:
    squares, divide = _squares(capability), _divide(capability)
    for count in (squares, divide):
        assert count["ld.global.v4.b32"] and not count["ld.global.b16"]
        assert not any(re.match(r"fma|mad\.(rn|f32)", x) for x in count)
        assert {x for x in count if "ftz" in x} <= FLUSHING
    assert divide["st.global.v4.b32"] and divide["div.rn.f32"] + divide["div.rn.ftz.f32"] == 32
    assert divide["cvt.rn.f16x2.f32"] or divide["cvt.rn.f16.f32"]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_norm_is_rounded_once(capability: int) -> None:
    pytest.importorskip("triton", reason="the kernels are triton's")
    from megatron_muon.orthogonalize import normalization_kernels as kernels

    signature = {
        **{"tiles": "*fp32", "moves": "*u8", "made": "*fp32"},
        **{"per_matrix": "i32", "scale": "fp32"},
    }
    constants = {"HAS_MOVES": True, "AT_ONCE": 1024}
    count = instructions(kernels.norm_kernel, signature, constants, kernels.LAUNCH, capability)
    assert count["sqrt.rn.f32"] + count["sqrt.rn.ftz.f32"] == 1
    assert {x for x in count if "ftz" in x} <= FLUSHING and not any("approx" in x for x in count)


def test_registers_spills_and_widths_of_all_kernels_are_those_that_are_recorded() -> None:
    """None spills; rows that start at 16 bytes are read and written 16 bytes at a time.

    In a process of its own, whose stand-in for a driver stays.
    """
    pytest.importorskip("triton", reason="the kernels are triton's")
    path = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "figures.kernels"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == (TESTS / "support" / "expected" / "kernels.tsv").read_text()
    _, *rows = (line.split("\t") for line in done.stdout.splitlines())
    assert len(rows) == 27 and not any(int(n) for row in rows for n in row[2::4])
    whole = [row for row in rows if "in eights" in row[0] and "norm" not in row[0]]
    assert len(whole) == 5 and all({*row[3::4]} == {"16"} for row in whole)


def _first_step(*words: str, **environment: str) -> subprocess.Popen[str]:
    pytest.importorskip("triton", reason="the kernels are triton's")
    path = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "support.kernels.first_step", *words],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_step_compiles_nothing_that_was_not_compiled_when_the_optimizer_was_built() -> None:
    """In every layout, offset and batch."""
    said, _ = _first_step().communicate(timeout=280)
    assert said.count(" variants are tried") == 10, said


@pytest.mark.slow  # 16 s of eight processes
def test_ranks_that_compile_at_once_survive_a_cache_that_refuses_files(tmp_path: Path) -> None:
    """Eight processes and one folder, whose file system says EBUSY or ESTALE now and then."""
    ranks = [_first_step("busy", str(n), TRITON_CACHE_DIR=str(tmp_path)) for n in range(8)]
    printed = [rank.communicate(timeout=280)[0] for rank in ranks]
    found = [re.fullmatch(r"(\d+) refused, 7 variants\n", said) for said in printed]
    assert all(found), printed
    assert sum(int(each[1]) for each in found if each) >= 4
