"""After an error that a framework catches, nothing goes on from half a step or half a
load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_muon.mcore.checkpoint.chain import HALF_LOADED
from megatron_muon.rules.muon import Foreach
from megatron_muon.runtime.engine import HALF_STEPPED
from support.checkpoints.saving import (
    formats,
    load,
    reading_the_other,
    save,
    save_new,
    spoil,
    unequal,
)
from support.models.gpt import (
    Built,
    Case,
    Topology,
    are_unchanged,
    held,
    inner_optimizers,
    on_ranks,
    prepare_step,
    start,
    stepped,
    take_step,
    take_steps,
)
from support.ranks import error_of, run
from support.runs.topologies import DP2, DP2_EP2, ONE, TP2

DENSE = Case().with_muon(round_bytes=1)  # a round for each matrix
EXPERTS = replace(DENSE, moe=True)
LOST = "lost in the middle"


@contextmanager
def failing_at(owner: Any, name: str, call: int) -> Iterator[None]:
    """The method raises instead of that call, from 0."""
    original = getattr(owner, name)
    calls = iter(range(1000))

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise RuntimeError(LOST)
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, replaced):
        yield


# --- steps ----------------------------------------------------------------------------


def _adamws_step(built: Built) -> type:
    """The class whose ``step`` is AdamW's part."""
    return type(inner_optimizers(built.optimizer)[0]).__mro__[1]


PLACES: dict[str, Callable[[Built], tuple[Any, str, int]]] = {
    "momentum": lambda built: (Foreach, "advance_momentum", 1),
    "update": lambda built: (Foreach, "apply_updates", 1),
    "last update": lambda built: (Foreach, "apply_updates", _rounds(built) - 1),
    "adamw": lambda built: (_adamws_step(built), "step", 0),
}


def _rounds(built: Built) -> int:
    """Of the first optimizer: the second has started its own when the last one ends."""
    return len(built.parts[0].muon.rounds)


def _after_a_half_step(
    case: Case, topology: Topology, where: str, format: str, folder: Path
) -> tuple[list[str], list[str]]:
    """Errors of a step that fails, of the next one and of saves; then what a load did
    not heal.
    """
    built = stepped(case, topology, 1)
    save(built, f"{folder}/good", format)
    take_step(built, 1)
    expected = held(built)
    with failing_at(*PLACES[where](built)):
        first = error_of(partial(take_step, built, 2))
    errors = [
        first,
        error_of(partial(take_step, built, 2)),
        error_of(partial(save, built, f"{folder}/bad", format)),
        error_of(built.optimizer.state_dict),
        error_of(partial(take_step, built, 2)),
    ]
    load(built, f"{folder}/good", format)
    take_step(built, 1)
    return errors, unequal(expected, held(built), "after a load: ", log=False)


@pytest.mark.parametrize("where", PLACES)
def test_half_a_step_is_refused_until_a_load(where: str, tmp_path: Path) -> None:
    check_half_step(DENSE, TP2, where, formats()[-1], tmp_path)


def test_half_a_step_before_that_of_experts_is_refused_until_a_load(
    tmp_path: Path,
) -> None:
    """Theirs has begun by then, with the gradients of that step."""
    check_half_step(EXPERTS, DP2_EP2, "last update", formats()[-1], tmp_path)


@pytest.mark.parametrize("format", formats()[:-1])
def test_every_format_heals_half_a_step(format: str, tmp_path: Path) -> None:
    check_half_step(DENSE, DP2, "update", format, tmp_path)


def check_half_step(
    case: Case, topology: Topology, where: str, format: str, folder: Path
) -> None:
    results = on_ranks(_after_a_half_step, case, topology, where, format, folder)
    for (first, *later), unlike in results:
        assert LOST in first
        for text in later:
            assert text == f"RuntimeError: {HALF_STEPPED}"
        assert unlike == []


def _of_one_rank() -> list[str]:
    built = start(DENSE, TP2)
    if dist.get_rank() == 1:
        part = type(built.parts[0])
        with failing_at(part, "_copy_main_params_to_model_params", 0):
            first = error_of(partial(take_step, built, 0))
    else:
        first = error_of(partial(take_step, built, 0))
    before = held(built)["shards"]
    second = error_of(partial(take_step, built, 1))
    same = are_unchanged(built, before)
    return [first, second, str(same)]


def test_half_a_step_of_one_rank_ends_the_next_step_of_all() -> None:
    """Muon's last messages have arrived by then, so the other knows of nothing."""
    one, other = run(_of_one_rank, 2)
    assert one == [
        "no error",
        f"RuntimeError: rank 1 stopped this run: {HALF_STEPPED}",
        "True",
    ]
    assert LOST in other[0] and other[1:] == [f"RuntimeError: {HALF_STEPPED}", "True"]


def _scales(case: Case, fails: bool) -> list[float]:
    """The loss scales of a run, with or without an error once the dense part has its
    vote.
    """
    built = start(case, DP2_EP2)
    if fails:
        experts = type(built.optimizer.chained_optimizers[-1])
        prepare_step(built, 0)
        with failing_at(experts, "_unscale_main_grads_and_check_for_nan", 1):
            assert LOST in error_of(built.optimizer.step)
    take_steps(built, range(case.steps))
    scales: list[float] = built.log["loss_scales"]
    return scales


def test_an_error_between_two_votes_on_overflow_leaves_the_next_ones_as_they_are() -> (
    None
):
    """The experts' vote of a step would be counted in the next one."""
    overflow = ((1, "*.local_experts.3.linear_fc1.weight"),)
    case = Case(bf16=False, fp16=True, moe=True, overflow=overflow)
    assert run(_scales, 2, case, True) == run(_scales, 2, case, False)


# --- loads ----------------------------------------------------------------------------


def _read(built: Built, folder: Path) -> dict[str, Any]:
    """What a step leaves after a load of Muon's checkpoint into AdamW."""
    spoil(built)
    with reading_the_other(built):
        load(built, f"{folder}/muon", formats()[-1])
    take_step(built, built.case.steps)
    return held(built)


def _classes(built: Built) -> list[type]:
    return [type(built.optimizer), *map(type, built.optimizer.chained_optimizers)]


def _into_adamw(case: Case, topology: Topology, folder: Path, loads: bool) -> list[str]:
    """Errors after one within ``reading_muon``; then what a second try does not do as a
    first.
    """
    format = formats()[-1]
    adam = replace(case, optimizer="adam")
    save_new(case, topology, format, f"{folder}/muon")
    read = _read(start(adam, topology), folder)
    built = stepped(adam, topology, 1)
    untouched = held(built)
    built = start(adam, topology)
    classes = _classes(built)
    with suppress(ZeroDivisionError), reading_the_other(built):
        if loads:
            load(built, f"{folder}/muon", format)
        raise ZeroDivisionError
    errors = [
        error_of(partial(take_step, built, 0)),
        error_of(partial(save, built, f"{folder}/adamw", format)),
    ]
    if not loads:
        errors += ["another class"] * (_classes(built) != classes)
        errors += unequal(untouched, held(built), "undone: ")
    with suppress(ZeroDivisionError), reading_the_other(built):
        raise ZeroDivisionError  # another one, which has loaded nothing
    errors.append(error_of(built.optimizer.state_dict))
    again = _read(built, folder)
    return [*errors, *unequal(read, again, "at a second try: ", log=False)]


@pytest.mark.parametrize("loads", [False, True], ids=["", "loaded"])
@pytest.mark.parametrize("case, topology", [(DENSE, DP2), (EXPERTS, DP2_EP2)])
def test_an_error_within_reading_muon_is_undone_or_refused(
    case: Case, topology: Topology, loads: bool, tmp_path: Path
) -> None:
    refused = f"RuntimeError: {HALF_LOADED}"
    for errors in on_ranks(_into_adamw, case, topology, tmp_path, loads):
        assert errors == [refused if loads else "no error"] * 3


def _heals_by_adamws_own(folder: Path) -> list[str]:
    """A checkpoint of AdamW's is loaded after half of Muon's."""
    format = formats()[-1]
    adam = replace(DENSE, optimizer="adam")
    expected = save_new(adam, ONE, format, f"{folder}/adamw")
    save_new(DENSE, ONE, format, f"{folder}/muon")
    built = start(adam, ONE)
    with suppress(ZeroDivisionError), reading_the_other(built):
        load(built, f"{folder}/muon", format)
        raise ZeroDivisionError
    load(built, f"{folder}/adamw", format)
    unlike = unequal(expected, held(built), "", log=False)
    take_step(built, adam.steps)
    return unlike


def test_adamws_own_checkpoint_heals_half_a_load_of_muons(tmp_path: Path) -> None:
    assert run(_heals_by_adamws_own, 1, tmp_path) == [[]]


def _nothing_read() -> list[str]:
    built = start(replace(DENSE, optimizer="adam"), ONE)
    with reading_the_other(built):
        pass
    return [type(built.optimizer).__name__, error_of(partial(take_step, built, 0))]


def test_reading_muon_without_a_load_leaves_adamw_as_it_was() -> None:
    assert run(_nothing_read, 1) == [["ChainedOptimizer", "no error"]]


def _into_muon(folder: Path, spoils: bool) -> list[str]:
    """Errors after one within ``reading_adamw``, or at its end; then after a whole
    load.
    """
    format = formats()[-1]
    adam = replace(DENSE, optimizer="adam")
    save_new(adam, ONE, format, f"{folder}/adamw")
    built = start(DENSE, ONE)
    with suppress(ZeroDivisionError, ValueError), reading_the_other(built):
        load(built, f"{folder}/adamw", format)
        if not spoils:
            raise ZeroDivisionError
        with torch.no_grad():
            # main parameters do not round to it
            next(iter(built.params.values())).mul_(2.0)
    step = partial(take_step, built, 0)
    saves = partial(save, built, f"{folder}/muon", format)
    errors = [error_of(step), error_of(saves)]
    with reading_the_other(built):
        load(built, f"{folder}/adamw", format)
    return [*errors, error_of(step), error_of(saves)]


@pytest.mark.parametrize("spoils", [False, True], ids=["within", "at its end"])
def test_an_error_of_reading_adamw_is_refused_until_a_load(
    spoils: bool, tmp_path: Path
) -> None:
    refused = f"RuntimeError: {HALF_LOADED}"
    (errors,) = run(_into_muon, 1, tmp_path, spoils)
    assert errors == [refused, refused, "no error", "no error"]
