"""What loops of reinforcement learning do with parameters and state right after a
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from support.models.gpt import (
    Built,
    Case,
    Topology,
    held,
    on_ranks,
    prepare_step,
    start,
    truth,
)
from support.runs.messages import late_gathers
from support.runs.topologies import TP2_DP2
from support.runs.whole import differences, whole

DENSE = Case().with_muon(round_bytes=1)  # a round for each parameter
EXPERTS = replace(DENSE, moe=True)
IN_BUCKETS = Topology.of("dp3 overlap bucket_size30000")
ADAMW = replace(DENSE, optimizer="adam")
RUNS = [
    (DENSE, IN_BUCKETS),
    (EXPERTS, Topology.of("dp4 overlap ep2")),
    (DENSE, TP2_DP2),
]


def _weights(built: Built) -> dict[str, Tensor]:
    return {name: param.data.clone() for name, param in built.params.items()}


def _step(built: Built, step: int) -> None:
    prepare_step(built, step)
    for group in built.groups:
        group.param_gather_dispatched = False  # as the backward pass does
    built.optimizer.step()


def _forward(built: Built) -> None:
    """As far as parameters are concerned."""
    if built.topology.overlap:
        for group in reversed(built.groups):
            group.finish_param_sync()


# -------------------------------------------------------------------------- weights


def _by_force(built: Built) -> None:
    built.ddp.start_param_sync(force_sync=True)


def _by_hooks(built: Built) -> None:
    built.ddp.disable_forward_pre_hook()
    built.ddp.enable_forward_pre_hook()


def _by_waiting(built: Built) -> None:
    built.optimizer.wait_for_params()
    before = [group.param_gather_dispatched for group in built.groups]
    built.optimizer.wait_for_params()
    assert all(before)  # so the second has nothing to do, nor the forward pass


def _exported(
    case: Case, topology: Topology, sync: Callable[[Built], None]
) -> list[dict[str, Any]]:
    """What is read after each step, and what ranks hold once a forward pass has
    come.
    """
    with late_gathers():
        built = start(case, topology)
        found = []
        for step in range(case.steps):
            _step(built, step)
            sync(built)
            exported = _weights(built)
            _forward(built)
            kept = held(built)
            found.append(kept)
            found[-1]["unlike"] = [
                name
                for name, value in _weights(built).items()
                if not value.equal(exported[name])
            ]
    return found


@pytest.mark.parametrize("sync", [_by_force, _by_hooks, _by_waiting])
@pytest.mark.parametrize("case, topology", RUNS[:2])
def test_weights_exported_right_after_a_step_are_that_steps(
    case: Case, topology: Topology, sync: Callable[[Built], None]
) -> None:
    ranks = on_ranks(_exported, case, topology, sync)
    assert [found["unlike"] for rank in ranks for found in rank] == [
        []
    ] * case.steps * len(ranks)
    last = whole([rank[-1] for rank in ranks])
    assert differences(truth(case), last) == []


def _read(case: Case, topology: Topology) -> tuple[bool, int]:
    """Whether a plain read after a step is of this or the last one; what of it is this
    one's.
    """
    with late_gathers():
        built = start(case, topology)
        _step(built, 0)
        _forward(built)
        before = _weights(built)
        _step(built, 1)
        read = _weights(built)
        built.ddp.start_param_sync(force_sync=True)
        after = _weights(built)
    known = [(v == before[n]) | (v == after[n]) for n, v in read.items()]
    fresh = sum(int((v == after[n]).sum()) for n, v in read.items())
    return all(bool(each.all()) for each in known), fresh


def test_a_plain_read_is_never_staler_than_under_adamw() -> None:
    adamw = on_ranks(_read, ADAMW, IN_BUCKETS)
    for (whole_words, fresh), (_, least) in zip(
        on_ranks(_read, DENSE, IN_BUCKETS), adamw, strict=True
    ):
        assert whole_words and fresh >= 0.99 * least


# --------------------------------------------------------------------- sleep and wake


@contextmanager
def _asleep(built: Built) -> Iterator[None]:
    """Memory of parameters and gradients is given back; all else is elsewhere, then
    here again.
    """
    buffers = [(buffer, buffer.param_data.clone()) for buffer in built.buffers()]
    sizes = [
        (buffer.param_data.storage().size(), buffer.grad_data.storage().size())
        for buffer, _ in buffers
    ]
    _move_state(built)
    for buffer, _ in buffers:
        for data in (buffer.param_data, buffer.grad_data):
            data.fill_(torch.nan)
            data.storage().resize_(0)
    yield
    for (buffer, copy), (params, grads) in zip(buffers, sizes, strict=True):
        buffer.param_data.storage().resize_(params)
        buffer.param_data.copy_(copy)
        buffer.grad_data.storage().resize_(grads)
        buffer.grad_data.zero_()
    _move_state(built)


def _move_state(built: Built) -> None:
    """Main parameters and state tensors to other memory; what they had is NaN."""
    for part in built.parts:
        for shards in part.shard_fp32_from_float16_groups:
            for shard in shards:
                old, shard.data = shard.data, shard.data.clone()
                old.fill_(torch.nan)
        for state in part.optimizer.state.values():
            for key in [key for key, value in state.items() if torch.is_tensor(value)]:
                old, state[key] = state[key], state[key].clone()
                old.fill_(torch.nan)


def _moved(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    tensor.fill_(torch.nan)
    return copy


@contextmanager
def _megatron_moves(built: Built) -> Iterator[None]:
    """Megatron's own functions for it, to which a tensor here looks like one of a GPU,
    then not.
    """
    moves = {"cpu": _moved, "cuda": _moved}
    with mock.patch.multiple(Tensor, is_cuda=True, **moves):
        built.optimizer.offload_to_cpu()
    yield
    with mock.patch.multiple(Tensor, is_cuda=False, **moves):
        built.optimizer.restore_from_cpu()


def _slept(
    case: Case, topology: Topology, waits: bool, asleep: Any = _asleep
) -> dict[str, Any]:
    with late_gathers():
        built = start(case, topology)
        for step in range(case.steps):
            _step(built, step)
            if waits:
                built.optimizer.wait_for_params()
            with asleep(built):
                pass
            _forward(built)
        return held(built)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("case, topology", RUNS)
def test_memory_may_be_given_back_right_after_a_step(
    case: Case, topology: Topology, waits: bool
) -> None:
    results = on_ranks(_slept, case, topology, waits)
    assert differences(truth(case), whole(results)) == []


@pytest.mark.parametrize("case, topology", RUNS)
def test_state_comes_back_from_megatrons_own_offload(
    case: Case, topology: Topology
) -> None:
    results = on_ranks(_slept, case, topology, False, _megatron_moves)
    assert differences(truth(case), whole(results)) == []
