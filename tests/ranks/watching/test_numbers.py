"""Each number of a step is that of the whole matrices, in float64 on one process.

The same runs hold that logging changes no bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from support.expected.oracle import newton_schulz, qkv_rows
from support.models.gpt import (
    Case,
    Topology,
    muon_weights,
    on_ranks,
    printed_by,
    train,
    truth,
)
from support.runs.cases import whole_grad
from support.runs.topologies import (
    DP2,
    DP3,
    DP4_INSTANCES2,
    ONE,
    TP2_CP2,
    TP2_DP2,
    TP2_DP2_EP2_ETP1,
)
from support.runs.watching import Rows, having, logged, promised, watched
from support.runs.whole import differences

FP32 = Case(bf16=False, steps=2).with_muon(ns_dtype="fp32")
MOE = replace(FP32, moe=True)
SPLITS = (("*.linear_qkv.*", "heads"), ("*.linear_fc1.*", "gate-up"))
SPLIT = replace(FP32, gated=True, heads=12, groups=6, ffn=264).with_muon(splits=SPLITS)
SHAPED = replace(FP32, gated=True).with_muon(scale_mode="shape_scaling")
RUNS = [
    (FP32, Topology.of("pp2 dp2 overlap")),
    (SPLIT, TP2_CP2),
    (SHAPED, DP3),
    (Case(steps=2), DP4_INSTANCES2),
    (MOE, TP2_DP2_EP2_ETP1),
    (replace(MOE, zero_grads=("*.local_experts.3.*",)), DP3),
]


@pytest.mark.parametrize("case, topology", RUNS)
def test_numbers_of_matrices(case: Case, topology: Topology) -> None:
    seen, steps = logged(case, topology)
    assert differences(truth(case), seen) == [] and len(steps) == case.steps
    rough = 3e-2 if case.bf16 else 2e-4  # of a direction; bf16 rounds in Newton-Schulz
    for step, rows in enumerate(steps):
        expected = expected_numbers(case, step)
        found = having(rows, "momentum_norm")
        assert found.keys() == expected.keys()
        for row, numbers in found.items():
            assert numbers.keys() == expected[row].keys()
            for name, value in expected[row].items():
                allowed = rough if name in DIRECTIONS else 1e-2 * case.bf16 + 1e-5
                assert numbers[name] == pytest.approx(value, rel=allowed), (
                    step,
                    row,
                    name,
                )
    assert promised(case, topology) == pytest.approx(_promised(case), rel=1e-5)


def printed(case: Case, topology: Topology) -> str:
    """What a rank prints."""
    return printed_by(lambda: train(case, topology))[1]


def test_the_rank_that_writes_warns_of_an_expert_without_tokens() -> None:
    case = watched(replace(MOE, zero_grads=("*.local_experts.3.*",)))
    *others, last = on_ranks(printed, case, DP2)
    warned = [
        line for line in last.splitlines() if "matrices without a gradient" in line
    ]
    assert len(warned) == 1 and warned[0].startswith(
        "[megatron_muon] step 1: warning: "
    )
    assert not any("warning: " in text for text in others)


DIRECTIONS = {"update_rms", "cosine"}


def test_a_promise_is_that_of_the_matrix() -> None:
    case = FP32.with_muon(by_pattern=("*.linear_fc1.*:rms=0.4",))
    for row, rms in promised(case, ONE).items():
        assert rms == pytest.approx(0.4 if "linear_fc1" in row else 0.2)


@cache
def expected_numbers(case: Case, step: int) -> Rows:
    """From whole weights before the step, and whole gradients and momenta."""
    before = truth(replace(case, steps=step))["main"]
    momenta = truth(replace(case, steps=step + 1))["exp_avg"]
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name in sorted(muon_weights(case)):
        weight = before[name].double()
        momentum = momenta[name].double()
        gradient = whole_grad(case, name, tuple(weight.shape), step).double()
        for row, at in _matrices(case, name, weight):
            rows[row].append(_of_matrix(case, weight[at], gradient[at], momentum[at]))
    return {row: _pooled(members) for row, members in rows.items()}


def _matrices(case: Case, name: str, weight: Tensor) -> list[tuple[str, list[int]]]:
    """``(row, rows of the weight)`` of each of its matrices."""
    row = name.removesuffix(".weight")
    is_split = "splits" in dict(case.muon)
    if row.endswith("linear_qkv"):
        parts = qkv_rows(case.heads, case.groups, case.head_size)
        return [
            (f"{row}[{part}]", at[first : first + size])
            for part, at in zip("qkv", parts, strict=True)
            for size in [case.head_size if is_split else len(at)]
            for first in range(0, len(at), size)
        ]
    if is_split and row.endswith("linear_fc1"):
        half = len(weight) // 2
        return [
            (f"{row}[gate]", list(range(half))),
            (f"{row}[up]", list(range(half, 2 * half))),
        ]
    for expert in range(4):
        row = row.replace(f".local_experts.{expert}.", ".")
    return [(row, list(range(len(weight))))]


def _of_matrix(
    case: Case, weight: Tensor, gradient: Tensor, momentum: Tensor
) -> dict[str, float]:
    given = gradient + 0.95 * momentum
    moved = bool(gradient.any())
    direction = newton_schulz(given) if moved else torch.zeros_like(given)
    rows, cols = weight.shape
    update = _scale(case, rows, cols) * direction
    return {
        "elements": weight.numel(),
        "moved": float(moved),
        "update": float(update.square().sum()),
        "weight": float(weight.square().sum()),
        "momentum": float(momentum.square().sum()),
        "gradient": float(gradient.square().sum()),
        "product": float((gradient * update).sum()),
    }


def _scale(case: Case, rows: int, cols: int) -> float:
    shaped = dict(case.muon).get("scale_mode") == "shape_scaling"
    return 0.2 * math.sqrt(max(1.0, rows / cols) if shaped else max(rows, cols))


def _pooled(members: list[dict[str, float]]) -> dict[str, float]:
    total = {name: sum(member[name] for member in members) for name in members[0]}
    moved = sum(member["elements"] for member in members if member["moved"])
    return {
        "update_rms": math.sqrt(total["update"] / moved),
        "weight_rms": math.sqrt(total["weight"] / total["elements"]),
        "momentum_norm": math.sqrt(total["momentum"]),
        "gradient_norm": math.sqrt(total["gradient"]),
        "moved": total["moved"] / len(members),
        "cosine": total["product"] / math.sqrt(total["gradient"] * total["update"]),
    }


def _promised(case: Case) -> dict[str, float]:
    shapes: dict[str, tuple[int, int]] = {}
    for name, weight in truth(case)["main"].items():
        if name in muon_weights(case):
            for row, at in _matrices(case, name, weight):
                shapes[row] = (len(at), weight.shape[1])
    return {
        row: _scale(case, *shape) / math.sqrt(max(shape))
        for row, shape in shapes.items()
    }


def test_adamws_parameters_have_numbers() -> None:
    _, (first, *_) = logged(FP32, TP2_DP2)
    adamws = having(first, "gradient_rms")
    before = truth(replace(FP32, steps=0))["main"]
    names = {
        name.removesuffix(".weight"): name
        for name in before.keys() - muon_weights(FP32)
    }
    assert adamws.keys() == names.keys()
    for row, numbers in adamws.items():
        weight = before[names[row]].double()
        gradient = whole_grad(FP32, names[row], tuple(weight.shape), 0).double()
        assert numbers["weight_rms"] == pytest.approx(_rms(weight), rel=1e-5)
        assert numbers["gradient_rms"] == pytest.approx(_rms(gradient), rel=1e-5)


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())
