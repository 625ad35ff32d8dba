"""Whether gradients can be used is in Megatron's own norm of them, wherever a bad one is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_muon.mcore.wiring.gradients import LateNorm, norm_grads
from support.models.gpt import Case, Topology, held, prepare_step, start, take_step
from support.ranks import error_of, run

CASE = Case(layers=2, steps=3)
NORM = "decoder.final_layernorm.weight"  # TP ranks have replicas; Megatron's norm has the first's
CPU = torch.device("cpu")


def _shard(*elements: float, grad: bool = True) -> torch.Tensor:
    shard = torch.zeros(len(elements))
    shard.grad = torch.tensor(elements) if grad else None
    return shard


@pytest.mark.parametrize(
    "left_out",
    [_shard(2.0, math.nan), _shard(2.0, -math.inf), _shard(0.0, grad=False)],
    ids=["nan", "inf", "missing"],
)
def test_a_bad_or_missing_gradient_that_is_left_out_is_in_the_norm(left_out: torch.Tensor) -> None:
    here = _shard(1.0)
    assert here.grad is not None
    for counted, shards in (([here.grad], [here, left_out]), ([], [left_out])):
        (grad,) = norm_grads(counted, [shard.grad for shard in shards], CPU)
        assert grad.isnan().all()


def _bad_replica(topology: Topology) -> str:
    built = start(CASE, topology)
    take_step(built, 0)
    prepare_step(built, 1)
    if built.tp_rank == 1:
        built.params[NORM].main_grad.view(-1)[0] = math.nan
    return error_of(built.optimizer.step)


def test_a_bad_replica_on_one_tp_rank_is_an_error_on_all() -> None:
    first, second = run(_bad_replica, 2, Topology(tp=2))
    assert second.startswith("FloatingPointError: ") and "final_layernorm" in second
    assert first.startswith("RuntimeError: rank 1") and "final_layernorm" in first


def _steps_with_a_late_norm(bad: float) -> dict[str, Any]:
    """Megatron's norm is a tensor, as where Transformer Engine's kernels clip by one."""
    from megatron.core.optimizer import ChainedOptimizer

    of_megatron = ChainedOptimizer.get_grad_norm
    built = start(replace(CASE, clip=0.0), Topology(dp=2))
    said: dict[str, Any] = {}
    with mock.patch.object(
        ChainedOptimizer, "get_grad_norm", lambda self: torch.tensor([of_megatron(self)])
    ):
        take_step(built, 0)
        said["first"] = bool(held(built)["shards"])
        prepare_step(built, 1)
        next(iter(built.params.values())).main_grad.view(-1)[0] = bad
        said["second"] = built.optimizer.step()[0]
        for name, call in (
            ("saved", built.optimizer.state_dict),
            ("third", lambda: take_step(built, 2)),
        ):
            said[name] = error_of(call)
    return said


def test_a_late_norm_is_an_error_before_anything_is_saved() -> None:
    for said in run(_steps_with_a_late_norm, 2, math.nan):
        assert said["second"]
        assert said["saved"].startswith(
            "FloatingPointError: The previous step's gradient norm was nan"
        )
        assert "resume from the last checkpoint" in said["saved"]
    for said in run(_steps_with_a_late_norm, 2, 1.0):
        assert said["saved"] == said["third"] == "no error"


def test_a_late_norm_is_not_waited_for() -> None:
    norm = torch.tensor([2.0])
    late = LateNorm(norm)
    norm.fill_(math.nan)  # of a later step
    late.require_finite()
