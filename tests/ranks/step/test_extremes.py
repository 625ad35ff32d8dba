"""Gradients whose squares fp32 does not have: a rule moves the matrix as ever, or counts
the step in which it did not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_muon.settings.rules import RULES
from ranks.results.test_nonfinite import FC1, _changed
from ranks.step.test_every_rule import CASE
from support.models.gpt import (
    Case,
    Topology,
    held,
    on_ranks,
    start,
    take_step,
    take_steps,
)
from support.ranks import error_of, run
from support.runs.topologies import ONE, TP2_DP2
from support.runs.whole import differences, whole

Held = dict[str, dict[str, Tensor]]
Change = Callable[[Tensor, int], object]  # of a gradient, by the step


def _scale(factor: float, grad: Tensor, step: int) -> None:
    if step:
        grad.mul_(factor)


def _two_steps(case: Case, topology: Topology, change: Change) -> tuple[Any, Any]:
    """What is held after a second step with another gradient of FC1, and what it
    skipped.
    """
    with _changed(FC1, change):
        built = start(case, topology)
        take_steps(built, range(2))
    return held(built), built.part.muon.nonfinite.skipped(waits=True)


def _main(case: Case, topology: Topology, change: Change) -> tuple[Held, set[Any]]:
    ranks = on_ranks(_two_steps, case, topology, change)
    skipped = {(name, *n) for _, counts in ranks for name, n in counts.items()}
    return {"main": whole([one for one, _ in ranks])["main"]}, skipped


@pytest.mark.parametrize("topology", [ONE, TP2_DP2])
@pytest.mark.parametrize("rule", RULES)
def test_a_finite_gradient_of_any_size_moves_its_matrix_or_is_counted(
    rule: str, topology: Topology
) -> None:
    """2^100 is 1e30. Beside 2^50 the momentum is beyond the last bit, too."""
    case = CASE.with_muon(rule=rule)
    before, _ = _main(case, topology, partial(_scale, 0.0))
    for large, usual in ((2.0**100, 2.0**50), (2.0**-100, 2.0**-50)):
        found, skipped = _main(case, topology, partial(_scale, large))
        expected, none = _main(case, topology, partial(_scale, usual))
        assert none == set()
        assert not torch.equal(expected["main"][FC1], before["main"][FC1])
        if rule == "namo" and large > 1:
            assert skipped == {(FC1, 1, 0)}
            expected["main"][FC1] = before["main"][FC1]
        else:
            assert skipped == set()
        assert differences(found, expected) == []


def _to_the_edge(grad: Tensor, step: int) -> None:
    if step:
        grad.mul_(1.5e19 / float(grad.norm()))


def test_namo_counts_a_square_that_only_its_factors_take_out_of_range() -> None:
    """‖G‖² is 2.25e38, and of U = 1.95 · G it is beyond fp32's 3.4e38."""
    case = CASE.with_muon(rule="namo")
    before, _ = _main(case, ONE, partial(_scale, 0.0))
    found, skipped = _main(case, ONE, _to_the_edge)
    assert skipped == {(FC1, 1, 0)}
    assert torch.equal(found["main"][FC1], before["main"][FC1])


def _too_large(case: Case) -> str:
    """Weights of a norm whose square fp32 does not have."""
    built = start(case, ONE)
    for name, weight in built.ddp.module.named_parameters():
        if name == FC1:
            weight.data.mul_(2.0**100)
    built.optimizer.reload_model_params()
    return error_of(lambda: take_step(built, 0))


@pytest.mark.parametrize("given", [{}, {"radii": ((FC1, 3.0),)}])
def test_a_norm_whose_square_is_not_finite_is_refused(given: Any) -> None:
    (text,) = run(_too_large, 1, CASE.with_muon(**given))
    assert f"{FC1}: the norm is not from 1e-15 to 1e+15, and rule" in text
