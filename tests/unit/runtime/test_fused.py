"""The fused kernels make the bits of torch's operations on lists: in triton's
interpreter, and by the instructions that triton makes of them. No GPU runs here.

Both need triton (``requirements-pretrain.txt``); without it the tests say that they are
skipped.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_muon.rules.fused as fused
from megatron_muon import MuonConfig
from megatron_muon.orthogonalize import triton_operations
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.rules.fused import (
    Fused,
    describe_elementwise,
    elementwise_on,
    try_elementwise,
)
from megatron_muon.rules.muon import Foreach
from support.kernels.compiled import CAPABILITIES, instructions, interpreted
from support.processes import environment

CUDA = torch.device("cuda", 0)
CPU_DEVICE = torch.device("cpu")


# --- which one a run has --------------------------------------------------------------


@pytest.mark.parametrize(
    "device, setting, triton, fused_kernels",
    [
        (CUDA, "auto", True, True),
        (CUDA, "auto", False, False),
        (CUDA, "foreach", True, False),
        (CPU_DEVICE, "auto", True, False),
    ],
)
def test_kernels_are_cudas_where_triton_is_and_the_log_says_so(
    device: torch.device,
    setting: Any,
    triton: bool,
    fused_kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_operations, "has_triton", lambda: triton)
    config = MuonConfig(elementwise=setting)
    assert elementwise_on(device, Numerics(config)) is (
        Fused if fused_kernels else Foreach
    )
    said = describe_elementwise(device, Numerics(config))
    assert ("fused" in said) == fused_kernels
    assert ("triton is not installed" in said) == (setting == "auto" and not triton)


def test_kernels_that_do_not_run_are_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trial(kind: object, *rest: object) -> list[Tensor]:
        raise SystemError("Failed to find C compiler")

    assert_refused(trial, "Failed to find C compiler", monkeypatch)
    try_elementwise(CUDA, Numerics(MuonConfig(elementwise="foreach")))


def test_kernels_that_round_otherwise_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trial(kind: object, *rest: object) -> list[Tensor]:
        return [torch.tensor([1.0 if isinstance(kind, Fused) else 1.0 + 2**-23])]

    assert_refused(trial, "round otherwise", monkeypatch)


def assert_refused(trial: object, said: str, patch: pytest.MonkeyPatch) -> None:
    """With the error's way out."""
    patch.setattr(triton_operations, "has_triton", lambda: True)
    patch.setattr(fused, "trial", trial)
    with pytest.raises(RuntimeError, match=rf"{said}.*--muon-elementwise\) foreach"):
        try_elementwise(CUDA, Numerics(MuonConfig()))


def test_a_fused_multiply_add_would_fail_the_trial() -> None:
    """The trial's numbers tell: in double precision, rounded once, other bits come
    out.
    """

    class Contracted(Foreach):
        def advance_momentum(
            self, buffers: Any, grads: Any, *rest: Any, **more: Any
        ) -> None:
            momentum = torch.tensor(more["momentum"]).double()
            for m, g in zip(buffers, grads, strict=True):
                m.copy_(m.double() * momentum + g.double())

    made, expected = (
        fused.trial(kind, CPU_DEVICE, Numerics(MuonConfig()))
        for kind in (Contracted(), Foreach())
    )
    assert not torch.equal(made[0], expected[0])


@pytest.mark.parametrize(
    "broken, said",
    [
        (lambda n: torch.zeros(n, dtype=torch.float64), "torch.float64"),
        (lambda n: torch.zeros(2 * n)[::2], r"strides \(2,\)"),
        (lambda n: torch.zeros(n + 1), r"slices of 5 elements, got shape \(6,\)"),
    ],
    ids=["dtype", "strides", "size"],
)
def test_tensors_that_the_kernels_do_not_take_are_an_error(
    broken: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=f"{said}.*--muon-elementwise"):
        Fused().advance_momentum(
            [torch.zeros(5)],
            [broken(5)],
            [None],
            torch.zeros(0),
            (),
            momentum=0.9,
            nesterov=True,
        )


# --- in triton's interpreter ----------------------------------------------------------


def test_the_interpreter_makes_foreachs_bits() -> None:
    """In a process of its own, since triton reads the variable when a kernel is
    defined.
    """
    assert interpreted("support.kernels.interpreted") >= 10


# --- the instructions -----------------------------------------------------------------


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_each_product_and_sum_is_rounded_by_itself(capability: int) -> None:
    """ptxas never contracts ``mul.rn`` and ``add.rn`` (PTX ISA); none flushes
    subnormals.
    """
    seen = set()
    for name, count in instructions(capability).items():
        plus = {"momentum_kernel": "add.rn", "update_kernel": "sub.rn"}.get(
            name.split()[0]
        )
        if plus is None:
            continue
        seen.add(plus)
        floats = {
            x
            for x in count
            if re.search(r"\.(f32|f32x2)$", x) and not x.startswith("cvt")
        }
        allowed = {
            f"{op}.{kind}" for op in ("mul.rn", plus) for kind in ("f32", "f32x2")
        }
        moved = {x for x in floats if x.startswith(("setp.", "mov.", "selp."))}
        assert floats - moved <= allowed, name
        assert not any(
            x.startswith(("fma", "mad.rn", "mad.f32")) or "ftz" in x for x in count
        )
        for op in ("mul.rn", plus):
            assert any(x.startswith(op) for x in floats), name
    assert len(seen) == 2


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_messages_are_rounded_to_nearest_even(capability: int) -> None:
    counts = instructions(capability)
    for name in ("momentum_kernel fp32 to bf16 Nesterov", "update_kernel bf16"):
        casts = {x for x in counts[name] if x.startswith("cvt") and "bf16" in x}
        assert casts <= {"cvt.rn.bf16.f32", "cvt.rn.bf16x2.f32", "cvt.f32.bf16"}
        assert any(x.startswith("cvt.rn") for x in casts) == name.startswith("momentum")
    assert not any("bf16" in x for x in counts["update_kernel fp32"])


def test_the_kernels_blocks_are_those_of_the_tables() -> None:
    pytest.importorskip("triton", reason="the kernels are triton's")
    from megatron_muon.rules import fused_kernels

    assert fused_kernels.BLOCK == fused._BLOCK
    assert fused_kernels.LAUNCH["enable_fp_fusion"] is False
    assert (
        SimpleNamespace(**fused_kernels.LAUNCH).num_warps * 32 * 16
        == fused_kernels.BLOCK
    )


# --- what a run compiles -------------------------------------------------------------


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
    """Slices of any size and offset."""
    said, _ = _first_step().communicate(timeout=280)
    assert said.count("4 variants are tried, 4 in a step") == 4, said


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
    found = [re.fullmatch(r"(\d+) refused, 4 variants\n", said) for said in texts]
    assert all(found), texts
    assert sum(int(each[1]) for each in found if each) >= 4
