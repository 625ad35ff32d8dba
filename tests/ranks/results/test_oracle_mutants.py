"""Wrong oracles and wrong plugins: each must be noticed, and where it should be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from support.expected.oracle import Oracle
from support.expected.oracle_cases import (
    BF16,
    CASES,
    FP32,
    TOPOLOGIES,
    WHERE,
    compare,
    computed,
    heads_and_gate_up,
    oracle_for,
    outside,
    plugin,
)
from support.models.gpt import GROUPS, HEAD_SIZE, HEADS, Case, Topology, on_ranks, train
from support.runs.topologies import PP2_DP2, TP2_PP2_DP2
from support.runs.whole import whole


def names(wrong: dict[str, str], kind: str = "main") -> set[str]:
    """The last parts of the names whose ``kind`` is wrong, such as
    linear_fc1.weight.
    """
    return {
        ".".join(key.split(".")[-2:]) for key in wrong if key.startswith(f"{kind} ")
    }


MATRICES = {f"linear_{m}.weight" for m in ("qkv", "proj", "fc1", "fc2")}


def _thirds_of_qkv(name: str, w: Tensor) -> list[list[int]]:
    """Q, K and V as three ranges of rows, as if there were one query group."""
    q, kv = HEADS * HEAD_SIZE, GROUPS * HEAD_SIZE
    rows = list(range(w.shape[0]))
    return (
        [rows[:q], rows[q : q + kv], rows[q + kv :]] if "linear_qkv" in name else [rows]
    )


def _local_size(name: str, rows: int, cols: int) -> int:
    """Of a TP 2 slice: linear_qkv and linear_proj keep max(rows, cols) = 96 in
    theirs.
    """
    if name.endswith(("linear_qkv.weight", "linear_fc1.weight")):
        return max(rows // 2, cols)
    return max(rows, cols // 2)


FC = {"linear_fc1.weight", "linear_fc2.weight"}
# What is wrong of main parameters, at least, and of momenta; it may be more where
# AdamW's are too.
MUTANTS: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "without nesterov": ({"nesterov": False}, MATRICES, set()),
    "qkv by the wrong blocks": (
        {"blocks": _thirds_of_qkv},
        {"linear_qkv.weight"},
        set(),
    ),
    "scale of the local matrix": ({"scale_size": _local_size}, FC, set()),
    "one step less": ({"ns_steps": 4}, MATRICES, set()),
    "without clipping": ({"clip": 0.0}, MATRICES, MATRICES),
    "without decay": ({"weight_decay": lambda name, w: 0.0}, MATRICES, set()),
}


@pytest.mark.parametrize("case", [FP32, BF16])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str, case: Case) -> None:
    changes, main, momenta = MUTANTS[mutant]
    wrong = compare(case, TOPOLOGIES[1], **changes)
    if mutant in ("without clipping", "without decay"):  # AdamW's are, too
        assert main <= names(wrong) and momenta <= names(wrong, "exp_avg")
    else:
        assert (names(wrong), names(wrong, "exp_avg")) == (main, momenta)


class _Growing(dict[Any, Any]):
    """Radii that are a hundred-thousandth too large."""

    def setdefault(self, key: Any, radius: Any = None) -> Any:
        return super().setdefault(key, (1 + 1e-5) * radius)


@pytest.mark.parametrize(
    "case, changes, wrong",
    [
        # decay of all, and of the others
        ("cautious-decay", {"cautious": False}, MATRICES),
        (
            "cautious-decay",
            {"opposed": lambda w, direction: w * direction > 0},
            MATRICES,
        ),
        # a plain step, another radius, one radius of q, k and v
        ("hyperball", {"rule": ""}, MATRICES),
        ("hyperball", {"radii": _Growing()}, MATRICES),
        (
            "hyperball",
            {"blocks": lambda name, w: [list(range(len(w)))]},
            {"linear_qkv.weight"},
        ),
    ],
)
def test_mutants_of_a_rule_and_of_its_decay_are_noticed(
    case: str, changes: dict[str, Any], wrong: set[str]
) -> None:
    found = compare(CASES[case], TP2_PP2_DP2, **changes)
    assert names(found) == wrong and names(found, "exp_avg") == set()


def _without_sums() -> Any:
    """A home takes its rows of its own squares for those of the sum."""
    from megatron_muon.runtime.exchange.sharers import Sharers

    def add(sharers: Any, squares: Sequence[Tensor]) -> Tensor:
        own = sharers._ranges["rows"][sharers._rank]
        return sum(squares)[own.start : own.stop]

    return mock.patch.object(Sharers, "add", add)


def _with_the_scale_of_a_strip() -> Any:
    from megatron_muon.rules.muon import Muon, update_scale

    made = Muon.__init__

    def init(rule: Any, *args: Any) -> None:
        made(rule, *args)
        rule.scales = [
            update_scale(*matrix.unit, config)
            for matrix, config in zip(rule.plan.matrices, rule.configs, strict=True)
        ]

    return mock.patch.object(Muon, "__init__", init)


def _with_flipped_columns() -> Any:
    """A home takes the columns of its range the other way round, and sends them back as
    they are: what it iterates on is right, but for their places.
    """
    from megatron_muon.runtime.exchange.sharers import Sharers

    rows_to_columns = Sharers.rows_to_columns
    return mock.patch.object(
        Sharers,
        "rows_to_columns",
        lambda self, by_rows: [one.flip(1) for one in rows_to_columns(self, by_rows)],
    )


@pytest.mark.parametrize(
    "mutation, topology, wrong",
    [
        (_without_sums, TP2_PP2_DP2, {"linear_qkv", "linear_fc1", "linear_fc2"}),
        (_with_the_scale_of_a_strip, TP2_PP2_DP2, {"linear_fc1", "linear_fc2"}),
        (_with_flipped_columns, PP2_DP2, {"linear_qkv", "linear_fc2"}),
        # fc2's parts come
        (_with_flipped_columns, TP2_PP2_DP2, {"linear_qkv"}),
    ],
)
def test_mutants_of_shared_matrices_are_noticed(
    mutation: Any, topology: Topology, wrong: set[str]
) -> None:
    """K and V are wide; their scale is that of the columns."""
    case = CASES["shared"]
    results = on_ranks(train, case, topology, mutation)
    norms = results[0]["log"]["norms"]
    found = outside(case, whole(results), computed(case, oracle_for(case), norms))
    assert names(found) == {f"{name}.weight" for name in wrong}


@pytest.mark.parametrize("weight", ["linear_qkv.weight", "linear_fc1.weight"])
def test_mutants_without_a_split_are_noticed(weight: str) -> None:
    case = CASES["heads-and-gate-up"]

    def blocks(name: str, w: Tensor) -> list[list[int]]:
        if name.endswith(weight):
            return [list(range(w.shape[0]))]
        return heads_and_gate_up(case, name, w)

    assert names(compare(case, TP2_PP2_DP2, blocks=blocks)) == {weight}


def test_mutant_with_inputs_for_outputs_is_noticed() -> None:
    """Where the scale goes by their ratio, and a matrix is not square."""
    case = CASES["unit-rms-norm"]
    wrong = compare(case, TP2_PP2_DP2, scale_size=lambda name, rows, cols: cols / rows)
    assert {"linear_fc1.weight", "linear_fc2.weight"} <= names(wrong) <= MATRICES


class _OneMatrix(Oracle):
    """Takes a batch of experts for one matrix, as the parameter's two dims suggest."""

    def _muon(self, name: str, w: Tensor, g: Tensor) -> None:
        flat = partial(torch.flatten, start_dim=0, end_dim=-2)
        if name in self.momentum:
            self.momentum[name] = flat(self.momentum[name])
        super()._muon(name, flat(w), flat(g))
        self.momentum[name] = self.momentum[name].view(w.shape)


def test_mutant_with_all_experts_of_a_batch_as_one_matrix_is_noticed() -> None:
    case = CASES["legacy-experts"]
    result, norms = plugin(case, WHERE["legacy-experts"])
    oracle = oracle_for(case)
    oracle.__class__ = _OneMatrix
    wrong = outside(case, result, computed(case, oracle, norms))
    assert names(wrong) == {"experts.weight1", "experts.weight2"}
