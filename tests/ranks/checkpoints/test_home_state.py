"""What a rule keeps at homes, saved by the names of units, at other topologies and by
other rules.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.mcore.checkpoint.buffers import home_key
from megatron_muon.mcore.checkpoint.chain import WHOLE_WEIGHTS
from megatron_muon.planning.layout import Matrix
from megatron_muon.runtime.home_state import HomeState
from ranks.results.test_nonfinite import FC1, _planted
from ranks.step.test_no_gradient import NAMES
from support.checkpoints.saving import formats, held, load, save, unequal
from support.checkpoints.sealing import plugin
from support.marks import in_each_format
from support.models.gpt import (
    Built,
    Case,
    on_ranks,
    start,
    stepped,
    take_step,
    take_steps,
)
from support.ranks import error_of, run
from support.runs.topologies import (
    DP2,
    DP2_EP2,
    DP3,
    DP4_EP4,
    DP4_INSTANCES2,
    ONE,
    PP2,
    PP2_DP2,
    TP2,
    TP2_DP2,
    TP2_DP3,
)

MUON = Case(steps=2, bf16=False).with_muon(ns_dtype="fp32")
CASE = MUON.with_muon(rule="normuon")
SHARED = CASE.with_muon(split_matrices=2)
COLUMNS = CASE.with_muon(splits=(("*.linear_proj.*", "cols:48,48"),))
NAMO = SHARED.with_muon(rule="namo")
MOE = replace(CASE, moe=True)

Numbers = dict[str, list[float]]


def _numbers(built: Built) -> Numbers:
    """Of all units of this rank's stage."""
    found: Numbers = {}
    for part in built.parts:
        home = part.muon.rule.home_state
        for name, numbers in home.gathered(part.stage_group).items():
            assert name not in found
            found[name] = numbers.tolist()
    return found


def _saves(*of_run: Any) -> tuple[Numbers, dict[str, Any]]:
    case, topology, format, folder = of_run
    built = stepped(case, topology, 1)
    before = held(built)
    save(built, folder, format)
    return (_numbers(built) if "rule" in dict(case.muon) else {}), before


def _loads(*of_run: Any) -> Numbers:
    case, topology, format, folder = of_run
    built = start(case, topology)
    take_step(built, 3)  # numbers of its own, which a load replaces
    with plugin(built):
        load(built, folder, format)
    return _numbers(built)


RESHARDS = [
    (NAMO, TP2_DP2, WHOLE_WEIGHTS, NAMO, PP2_DP2),
    (SHARED, TP2_DP2, WHOLE_WEIGHTS, SHARED, PP2),
    (COLUMNS, ONE, WHOLE_WEIGHTS, COLUMNS, TP2),
    (MOE, DP2_EP2, WHOLE_WEIGHTS, MOE, DP4_EP4),
    (CASE, TP2, WHOLE_WEIGHTS, SHARED, DP4_INSTANCES2),
    (SHARED, DP2, formats()[0], CASE, DP3),
    (CASE, TP2_DP2, "torch", SHARED, TP2_DP3),
]


@pytest.mark.parametrize("of_runs", RESHARDS)
def test_numbers_are_those_of_the_checkpoint(of_runs: Any, tmp_path: Path) -> None:
    case, topology, format, then_case, then = of_runs
    saved: Numbers = {}
    folder = tmp_path
    for of_stage, _ in on_ranks(_saves, case, topology, format, folder):
        saved |= of_stage
    assert all(any(numbers) for numbers in saved.values())
    loaded: Numbers = {}
    for numbers in on_ranks(_loads, then_case, then, format, folder):
        assert numbers.items() <= saved.items()
        loaded |= numbers
    assert loaded == saved


def _after_steps(case: Case, steps: int) -> Numbers:
    built = start(case, ONE)
    take_steps(built, range(steps))
    return _numbers(built)


@pytest.mark.parametrize("case", [CASE, NAMO])
def test_those_of_a_matrix_without_a_gradient_stay(case: Case) -> None:
    stopped = replace(case, zero_grads=NAMES, zero_from=1)
    (then,) = run(_after_steps, 1, stopped, 1)
    (now,) = run(_after_steps, 1, stopped, 3)
    stayed = [name for name in now if now[name] == then[name]]
    assert len(stayed) == len(NAMES) < len(now)


def _saves_beside_a_step(*of_run: Any) -> Numbers:
    case, topology, format, folder = of_run
    built = stepped(case, topology, 1)
    before = _numbers(built)
    save(built, folder, format, meanwhile=partial(take_step, built, 1))
    assert _numbers(built) != before
    return before


@pytest.mark.parametrize("case", [CASE, NAMO])
def test_an_asynchronous_save_has_those_of_its_step(case: Case, tmp_path: Path) -> None:
    of_run = case, DP2, WHOLE_WEIGHTS, tmp_path
    saved, _ = run(_saves_beside_a_step, 2, *of_run)
    for loaded in run(_loads, 2, *of_run):
        assert loaded == saved


BY_OTHERS = [
    (MUON, CASE),
    (NAMO, CASE),
    (CASE, NAMO),
    *(
        tuple(replace(case, moe=True, dense_layers=1) for case in pair)
        for pair in ((CASE, NAMO), (NAMO, CASE))
    ),
]


@pytest.mark.parametrize("cases", BY_OTHERS)
@in_each_format
def test_a_checkpoint_of_another_rule_has_none_and_they_start_at_zero(
    format: str, cases: tuple[Case, Case], tmp_path: Path
) -> None:
    then, now = cases
    of_run = DP2, format, tmp_path
    run(_saves, 2, then, *of_run)
    for numbers in run(_loads, 2, now, *of_run):
        assert numbers and not any(map(any, numbers.values()))


def _error_of_load(*of_run: Any) -> str:
    return error_of(partial(_loads, *of_run))


WHOLE = CASE.with_muon(split_qkv=False)


@in_each_format
def test_second_moments_of_other_units_are_refused_with_a_way_out(
    format: str, tmp_path: Path
) -> None:
    of_run = DP2, format, tmp_path
    run(_saves, 2, CASE, *of_run)
    for text in run(_error_of_load, 2, WHOLE, *of_run, timeout=60.0):
        assert "(--muon-rule) normuon belong to units: give splits (--muon" in text
    # the way out
    run(_takes_over, 2, WHOLE.with_muon(rule="muon"), *of_run)
    for numbers in run(_loads, 2, WHOLE, *of_run):
        assert numbers and not any(map(any, numbers.values()))


def _takes_over(*of_run: Any) -> None:
    case, topology, format, folder = of_run
    built = start(case, topology)
    with plugin(built):
        load(built, folder, format)
    save(built, folder, format)


def _loads_muon(*of_run: Any) -> list[str]:
    case, topology, format, folder = of_run
    _, before = _saves(case, topology, format, folder)
    built = start(MUON, topology)
    take_step(built, 3)
    load(built, folder, format)
    return unequal(before, held(built), "", log=False)


@pytest.mark.parametrize("case", [CASE, NAMO])
@in_each_format
def test_muon_goes_on_from_its_checkpoint(
    format: str, case: Case, tmp_path: Path
) -> None:
    for unlike in on_ranks(_loads_muon, case, DP2, format, tmp_path):
        assert unlike == []


def _damaged(value: Any) -> str:
    built = stepped(CASE, DP2, 1)
    before = _numbers(built)
    state = built.optimizer.state_dict()
    state[home_key("normuon")] = {**before, FC1: value}
    text = error_of(lambda: built.optimizer.load_state_dict(state))
    assert _numbers(built) == before
    return text


def test_a_load_of_numbers_that_are_none_ends_on_all_ranks() -> None:
    texts = run(_damaged, 2, "text", timeout=60.0)
    assert any("the checkpoint has the rule's state of" in text for text in texts)
    assert all(texts)


MATRICES = [Matrix("a", 4, 8), Matrix("b", 8, 4, home=1)]
LONG = torch.ones(8)


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        ([1.0], "has no names"),
        ({"b": LONG}, "the rule's state of 1 units, and none of a. WAY OUT"),
        ({"a": "text"}, "and none of a"),
        ({"a": LONG[:4]}, r"float32 of shape \(4,\) in the checkpoint, .* \(8,\)"),
        ({"a": LONG.double()}, "is torch.float64 of shape"),
        ({"a": LONG * math.nan}, "below 0.0 or not finite"),
        ({"a": -LONG}, "below 0.0 or not finite"),
    ],
)
def test_numbers_that_are_none_are_refused(saved: Any, text: str) -> None:
    home = HomeState(MATRICES, 0, torch.device("cpu"), least=0.0)
    with pytest.raises(ValueError, match=text):
        home.require_usable(saved, "WAY OUT")


def test_only_second_moments_must_not_be_negative() -> None:
    built = HomeState(MATRICES, 0, torch.device("cpu"))
    built.require_usable({"a": -LONG}, "")
    with pytest.raises(ValueError, match="below -inf or not finite"):
        built.require_usable({"a": -LONG * math.inf}, "")


def test_numbers_of_other_homes_are_wanted_of_a_whole_stage_alone() -> None:
    home = HomeState(MATRICES, 0, torch.device("cpu"))
    home.require_usable({"a": LONG, "of another home": LONG}, "")
    with pytest.raises(ValueError, match="and none of b"):
        home.require_usable({"a": LONG}, "", whole=True)


def _numbers_after(steps: int, planted: Any) -> Numbers:
    with planted():
        built = start(CASE, TP2)
        take_steps(built, range(steps))
    return _numbers(built)


def test_those_of_a_matrix_that_is_not_finite_stay() -> None:
    planted = _planted(FC1, math.nan)
    (before, *_), (after, *_) = (
        run(_numbers_after, 2, steps, planted) for steps in (1, 2)
    )
    assert {name for name in before if before[name] == after[name]} == {FC1}
