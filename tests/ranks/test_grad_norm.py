"""Megatron's norm of gradients: it tells a bad one wherever it is, and what the clip
scales.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_muon.mcore.wiring.gradients import LateNorm, norm_grads
from support.models.gpt import (
    Case,
    Topology,
    error_of_building,
    on_ranks,
    prepare_step,
    start,
    stepped,
    take_step,
    train,
)
from support.ranks import error_of, run
from support.runs.cases import muon_weights, whole_grad
from support.runs.topologies import DP2, ONE, PP2_DP2, TP2, TP2_DP2_OVERLAP
from support.runs.whole import whole

CASE = Case()
# TP ranks have replicas; Megatron's norm has the first's
NORM = "decoder.final_layernorm.weight"
CPU = torch.device("cpu")


def _shard(*elements: float, grad: bool = True) -> Tensor:
    shard = torch.zeros(len(elements))
    shard.grad = torch.tensor(elements) if grad else None
    return shard


@pytest.mark.parametrize(
    "left_out",
    [_shard(2.0, math.nan), _shard(2.0, -math.inf), _shard(0.0, grad=False)],
    ids=["nan", "inf", "missing"],
)
def test_a_bad_gradient_outside_the_norm_makes_it_nan(left_out: Tensor) -> None:
    here = _shard(1.0)
    assert here.grad is not None
    for counted, shards in (([here.grad], [here, left_out]), ([], [left_out])):
        (grad,) = norm_grads(counted, [shard.grad for shard in shards], CPU)
        assert grad.isnan().all()


def _bad_replica(topology: Topology) -> str:
    built = stepped(CASE, topology, 1)
    prepare_step(built, 1)
    if built.tp_rank == 1:
        built.params[NORM].main_grad.view(-1)[0] = math.nan
    return error_of(built.optimizer.step)


def test_a_bad_replica_on_one_tp_rank_is_an_error_on_all() -> None:
    first, second = run(_bad_replica, 2, TP2)
    assert second.startswith("FloatingPointError: ") and "final_layernorm" in second
    assert first.startswith("RuntimeError: rank 1") and "final_layernorm" in first


def _steps_with_a_late_norm(bad: float) -> dict[str, Any]:
    """Megatron's norm is a tensor, as where Transformer Engine's kernels clip by
    one.
    """
    from megatron.core.optimizer import ChainedOptimizer

    of_megatron = ChainedOptimizer.get_grad_norm
    built = start(replace(CASE, clip=0.0), DP2)
    said: dict[str, Any] = {}
    with mock.patch.object(
        ChainedOptimizer,
        "get_grad_norm",
        lambda self: torch.tensor([of_megatron(self)]),
    ):
        take_step(built, 0)
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


FREE = Case(steps=2)
CLIPPED = replace(FREE, clip=0.01).with_muon(clip_scope="adamw")


@pytest.mark.parametrize("topology", [TP2_DP2_OVERLAP, PP2_DP2])
def test_muons_gradients_are_not_clipped_and_adamws_are(topology: Topology) -> None:
    clipped, free = (on_ranks(train, case, topology) for case in (CLIPPED, FREE))
    kept = whole(clipped)
    plain = whole(free)
    muons = muon_weights(FREE)
    for kind in ("main", "exp_avg"):
        for name in muons:
            assert torch.equal(kept[kind][name], plain[kind][name]), (name, kind)
    shapes = {name: tuple(weight.shape) for name, weight in plain["params"].items()}
    adamws = shapes.keys() - muons
    grads = [
        {name: whole_grad(FREE, name, shapes[name], step) for name in adamws}
        for step in range(FREE.steps)
    ]
    norms = [
        math.hypot(*(float(g.double().norm()) for g in each.values())) for each in grads
    ]
    assert clipped[0]["log"]["norms"] == pytest.approx(norms, rel=1e-6)
    for name in adamws:  # Adam's first moment of gradients that were scaled to the clip
        moment = torch.zeros(shapes[name])
        for norm, each in zip(norms, grads, strict=True):
            moment = 0.9 * moment + 0.1 * each[name] * CLIPPED.clip / norm
        # Megatron's 1e-6 in the clip's quotient; two steps may cancel
        rounding = float(moment.abs().max()) * 1e-6
        torch.testing.assert_close(
            kept["exp_avg"][name], moment, rtol=1e-4, atol=rounding
        )


def _bad_gradient() -> str:
    built = start(CLIPPED, DP2)
    prepare_step(built, 0)
    built.params["decoder.layers.1.mlp.linear_fc1.weight"].main_grad.view(-1)[0] = (
        math.nan
    )
    return error_of(built.optimizer.step)


def test_a_gradient_of_muons_must_still_be_finite() -> None:
    texts = run(_bad_gradient, 2)
    assert all("layers.1.mlp.linear_fc1" in text for text in texts)
    assert sum(text.startswith("FloatingPointError") for text in texts) == 1


def test_without_a_clip_it_is_refused() -> None:
    (text,) = on_ranks(error_of_building, FREE, ONE, {"clip_scope": "adamw"})
    assert text.startswith(
        "ValueError: clip_scope (--muon-clip-scope) 'adamw' with clip_grad 0.0"
    )
