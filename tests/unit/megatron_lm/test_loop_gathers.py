"""Which training loop is Megatron-LM's own, in which ``auto`` starts gathers within the
step.
"""

from __future__ import annotations

import functools
import sys
from contextlib import suppress
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_muon.mcore.wiring.buffers.early_gathers import EarlyGather, EarlyGathers
from megatron_muon.megatron_lm.loop import train
from megatron_muon.planning.schedule import ADAMW
from megatron_muon.runtime.patches import around

LOOP = """
def train_step(optimizer):
    return [part.early_gathers.is_on for part in optimizer.chained_optimizers]

def train(forward, model, optimizer):
    return train_step(optimizer)
"""


def _plain(step: Any) -> Any:
    return step


def _traced(step: Any) -> Any:
    return around(step, lambda *args: step(*args), lambda: True)


def _anothers(step: Any) -> Any:
    return lambda *args: step(*args)


def _named_as_megatrons(step: Any) -> Any:
    return functools.wraps(step)(lambda *args: step(*args))


def _run(
    monkeypatch: pytest.MonkeyPatch,
    wrap: Any,
    *,
    reinforced: bool = False,
    is_on: bool = False,
) -> list[bool]:
    """Whether gathers start within the step, in the loop, around which a wrapper is,
    and later.
    """
    package = ModuleType("megatron.training")
    loop = ModuleType("megatron.training.training")
    exec(LOOP, vars(loop))
    vars(package)["get_args"] = lambda: SimpleNamespace(perform_rl_step=reinforced)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, loop.__name__, loop)
    own: FunctionType = vars(loop)["train"]
    vars(loop)["train_step"] = wrap(vars(loop)["train_step"])
    early = EarlyGathers([], 0, is_on=is_on)
    parts = [SimpleNamespace(early_gathers=early)]
    within: list[bool] = train(
        own, None, [], optimizer=SimpleNamespace(chained_optimizers=parts)
    )
    return [*within, early.is_on]


@pytest.mark.parametrize("wrap", [_plain, _traced])
def test_early_gathers_are_on_in_megatron_lms_loop(
    wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run(monkeypatch, wrap) == [True, False]


@pytest.mark.parametrize("wrap", [_anothers, _named_as_megatrons])
def test_early_gathers_are_off_around_another_train_step_and_a_line_says_so(
    wrap: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, wrap) == [False, False]
    said = f"(--muon-early-param-gather) is off with the train_step of {__name__}\n"
    assert capsys.readouterr().out.endswith(said)


def test_with_reinforcement_learning_in_that_loop_they_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, _plain, reinforced=True) == [False, False]
    assert "is off with --perform-rl-step" in capsys.readouterr().out


def test_on_is_on_in_any_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, _anothers, reinforced=True, is_on=True) == [True, True]
    assert capsys.readouterr().out == ""


def test_a_load_after_an_error_in_the_loop_waits_for_gathers_and_forgets_them() -> None:
    """They have parameters of the step before the load, which else arrive after it."""
    waited: list[int] = []
    group = SimpleNamespace(
        wait_for_params=lambda: waited.append(0),
        start_param_sync=lambda: None,
        param_gather_dispatched=True,
    )
    gathers = EarlyGathers([EarlyGather(group, frozenset(), ADAMW, [])], 0, is_on=False)
    with suppress(ZeroDivisionError), gathers.turned_on(), gathers.step():
        gathers.applied(ADAMW)
        raise ZeroDivisionError
    waited.clear()
    gathers.forget()
    assert waited == [0] and not group.param_gather_dispatched
    gathers.forget()  # then they are Megatron's again
    assert waited == [0]
