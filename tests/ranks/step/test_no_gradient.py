"""A matrix moves in each step in which it has a gradient, however small, and in no
other.

Newton-Schulz takes the scale of the momentum away, so momentum alone would move a
matrix by whole updates for ever once its gradient is zero: a frozen layer, an expert
without tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from support.models import gpt
from support.models.gpt import Case, check, stepped, trained, truth
from support.ranks import run
from support.runs.topologies import ONE, TP2_DP2, TP2_DP2_EP2_ETP1, TP2_DP3
from support.runs.whole import differences

NAMES = (
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.1.mlp.linear_fc2.weight",
)
STOPPED = Case(steps=6, weight_decay=0.0, zero_grads=NAMES, zero_from=3)
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_a_matrix_stands_still_once_its_gradient_is_zero(bf16: bool) -> None:
    case = replace(STOPPED, bf16=bf16)
    after = check(case, TP2_DP3)
    before = truth(replace(case, steps=case.zero_from))
    for name, weight in after["main"].items():
        assert torch.equal(weight, before["main"][name]) == (name in NAMES), name
    for name in NAMES:  # the momentum decays as ever
        faded = before["exp_avg"][name] * 0.95 * 0.95 * 0.95
        torch.testing.assert_close(after["exp_avg"][name], faded, rtol=1e-6, atol=0)


def test_an_expert_without_tokens_stands_still() -> None:
    idle = ("*.local_experts.3.*",)
    case = Case(steps=4, weight_decay=0.0, moe=True, zero_grads=idle, zero_from=2)
    after = check(case, TP2_DP2_EP2_ETP1)
    before = truth(replace(case, steps=2))
    stood = {n for n, w in after["main"].items() if torch.equal(w, before["main"][n])}
    assert stood == {name for name in after["main"] if ".local_experts.3." in name}


@contextmanager
def _no_gradient_of_v() -> Iterator[None]:
    """From step 2 on; V is the last of a group's blocks of rows: its heads' Q, K, V."""
    whole_grad = gpt.whole_grad

    def changed(case: Case, name: str, shape: tuple[int, ...], step: int) -> Tensor:
        grad = whole_grad(case, name, shape, step)
        if name == QKV and step >= 2:
            grad.view(2, 5, 16, -1)[:, 4] = 0.0
        return grad

    with mock.patch.object(gpt, "whole_grad", changed):
        yield


def test_a_part_without_gradient_stands_still_beside_parts_that_move() -> None:
    case = Case(steps=4, weight_decay=0.0)
    one = trained(case, ONE, _no_gradient_of_v)
    assert differences(one, trained(case, TP2_DP2, _no_gradient_of_v)) == []
    moved = one["main"][QKV] != truth(replace(case, steps=2))["main"][QKV]
    parts = moved.view(2, 5, 16, -1)
    assert parts[:, :4].float().mean() > 0.99 and not parts[:, 4].any()


def _shards(built: gpt.Built) -> dict[str, Tensor]:
    """Main parameters by name."""
    from megatron_muon.mcore.host.shards import owned_shards

    names = built.names
    return {
        names[id(param)]: shard
        for part in built.parts
        for param, shard in owned_shards(part)
    }


def _ways(case: Case, scale: float) -> dict[str, float]:
    """Root mean square of a step, by name, with gradients this small after one that is
    not.
    """
    built = stepped(case, ONE, 1)
    shards = _shards(built)
    for part in built.parts:
        for state in part.optimizer.state.values():
            state["exp_avg"].zero_()
    before = {name: shard.clone() for name, shard in shards.items()}
    for shard in shards.values():
        shard.grad = scale * torch.randn(
            shard.shape, generator=torch.Generator().manual_seed(1)
        )
    for part in built.parts:
        part.optimizer.step()
    return {
        n: float((shard - before[n]).square().mean().sqrt())
        for n, shard in shards.items()
    }


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e-30])
def test_a_gradient_of_any_size_moves_a_matrix_by_a_whole_update(scale: float) -> None:
    """Simple's singular values lie between 0.68 and 1.13, so an update's RMS does in
    0.2 lr; 5 % more for rounding in bf16.
    """
    case = Case(lr=1e-3, weight_decay=0.0)
    (ways,) = run(_ways, 1, case, scale)
    for name in gpt.muon_weights(case):
        assert 0.68 * 0.95 <= ways[name] / (0.2 * 1e-3) <= 1.13 * 1.05, name
