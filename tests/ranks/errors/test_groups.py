"""Parameter groups that a step cannot use: an error of all ranks before anything
changes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.models.gpt import (
    Built,
    Case,
    are_unchanged,
    held,
    prepare_step,
    start,
    stepped,
    take_step,
)
from support.ranks import error_of, run
from support.runs.topologies import ONE, TP2

CASE = Case(layers=1)
NUMBERS = [None, "1e-3", float("inf"), float("nan")]


def _set(built: Built, key: str, value: Any, of_muon: bool) -> None:
    """In the groups with Muon's parameters, or in the others."""
    owns = built.part.muon.owns
    for group in built.param_groups:
        if any(map(owns, group["params"])) is of_muon:
            group[key] = value


def _error(
    case: Case, key: str, value: Any, of_muon: bool, where: int | None
) -> tuple[str, bool]:
    """The error of a second step, with that value on a rank or on all; whether all
    stayed.
    """
    built = stepped(case, TP2, 1)
    before = held(built)["shards"]
    prepare_step(built, 1)
    if where in (None, dist.get_rank()):
        _set(built, key, value, of_muon)
    text = error_of(built.optimizer.step)
    same = are_unchanged(built, before)
    take_step(built, 1)  # with its own values again
    return text, same


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
@pytest.mark.parametrize("value", NUMBERS)
def test_a_value_that_is_no_finite_number_is_an_error_before_the_step(
    key: str, value: Any
) -> None:
    for text, same in run(_error, 2, CASE, key, value, True, None):
        assert text.startswith("ValueError: parameter group ") and same, text
        assert f"has {key} {value!r}, which is no finite number" in text


@pytest.mark.parametrize(
    "case", [CASE, replace(CASE, bf16=False, fp16=True)], ids=["", "loss scale"]
)
def test_a_value_of_one_rank_ends_all(case: Case) -> None:
    one, other = run(_error, 2, case, "lr", None, True, 1)
    assert (
        other[0].startswith("ValueError: parameter group ")
        and "has lr None" in other[0]
    )
    assert (
        one[0] == f"RuntimeError: rank 1 stopped this run: {other[0].split(': ', 1)[1]}"
    )
    assert one[1] and other[1]


def test_a_value_of_adamws_groups_is_an_error_before_muons_part() -> None:
    for text, same in run(_error, 2, CASE, "lr", None, False, None):
        assert "layernorm" in text and "has lr None" in text and same, text


def _dropped() -> str:
    built = start(CASE, TP2)
    if dist.get_rank() == 0:
        owns = built.part.muon.owns
        for group in built.param_groups:
            group["params"] = [p for p in group["params"] if not owns(p)]
    return error_of(partial(take_step, built, 0))


def test_parameters_that_no_group_has_any_more_are_named_on_all_ranks() -> None:
    one, other = run(_dropped, 2)
    assert (
        one.startswith("ValueError: no parameter group has ")
        and "linear_qkv.weight" in one
    )
    assert other == f"RuntimeError: rank 0 stopped this run: {one.split(': ', 1)[1]}"


def _by_tensors(in_tensors: bool) -> dict[str, Any]:
    """What two steps leave, with rates and decays in tensors or not."""
    built = start(CASE, ONE)
    for step in range(2):
        prepare_step(built, step)
        for group in built.param_groups if in_tensors else ():
            for key in ("lr", "weight_decay"):
                group[key] = torch.tensor(group[key], dtype=torch.float64)
        ok, *_ = built.optimizer.step()
        assert ok
    return held(built)


def test_rates_may_be_tensors_with_one_element() -> None:
    (floats,), (tensors,) = (
        run(_by_tensors, 1, in_tensors) for in_tensors in (False, True)
    )
    for name, (*_, arrays) in floats["shards"].items():
        other = tensors["shards"][name][2]["main"]
        assert abs(arrays["main"] - other).max() <= 1e-6 * abs(other).max(), name
