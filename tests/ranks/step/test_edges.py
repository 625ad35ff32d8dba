"""Where a plan is at its edges, and gradients that are unusual."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from support.models.gpt import (
    SEQUENCE,
    VOCAB,
    Built,
    Case,
    Topology,
    held,
    muon_weights,
    set_schedule,
    start,
    take_step,
    train,
    trained,
    truth,
    whole_weight,
    write_grads,
)
from support.ranks import run
from support.runs.whole import differences, whole

MATRICES = ("*.linear_qkv.weight", "*.linear_proj.weight", "*.linear_fc1.weight")
CASE = Case(steps=3, muon=(("ns_dtype", "fp32"),))
# The six matrices of a layer: Q, K, V, proj, fc1, fc2.
LAYER_SHAPES = [(96, 96), (32, 96), (32, 96), (96, 96), (260, 96), (96, 260)]


def meters(built: Built) -> dict[str, int]:
    import megatron_muon

    meter = megatron_muon.meter(built.optimizer)
    sent = meter.gather_bytes + meter.scatter_bytes
    return {"matrices": meter.matrices, "flops": meter.ns_flops, "sent": sent}


def train_and_meter(case: Case, topology: Topology) -> dict[str, Any]:
    built = start(case, topology)
    for step in range(case.steps):
        take_step(built, step)
    return {**held(built), "meters": meters(built)}


def spans(results: list[dict[str, Any]], name: str) -> list[tuple[int, int]]:
    """[start, stop) of a parameter on each rank that owns some of it."""
    return [result["shards"][name][:2] for result in results if name in result["shards"]]


# --- shards ----------------------------------------------------------------------------------


def test_shard_cut_through_the_middle_of_a_row() -> None:
    topology = Topology(2, 1, 3)
    results = run(train, topology.world_size, CASE, topology)
    row_length = {"linear_proj": 48, "linear_qkv": 96, "linear_fc1": 96, "linear_fc2": 130}
    cuts = [
        (name, start)
        for result in results
        for name, (start, _, _) in result["shards"].items()
        if name.endswith(".weight") and start % row_length.get(name.split(".")[-2], 1)
    ]
    assert cuts, "no shard starts within a row: this shows nothing"
    assert differences(truth(CASE), whole(results)) == []


def test_parameter_spread_over_all_ranks() -> None:
    """With little else to train, one matrix is larger than a shard."""
    case = replace(CASE, frozen=(*MATRICES, "*bias", "*layernorm*", "embedding*", "output*"))
    topology = Topology(1, 1, 4)
    results = run(train_and_meter, topology.world_size, case, topology)
    held_by_name = {
        name: len(spans(results, name)) for result in results for name in result["shards"]
    }
    assert set(held_by_name) == {f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in (0, 1)}
    one = replace(case, frozen=(*case.frozen, "decoder.layers.0.*"))
    only = run(train_and_meter, topology.world_size, one, topology)
    assert len(spans(only, "decoder.layers.1.mlp.linear_fc2.weight")) == 4
    for each, got in ((case, results), (one, only)):
        assert differences(truth(each), whole(got)) == []


def test_rank_with_no_muon_piece() -> None:
    """Only one small matrix is trained beside the embedding and the output layer."""
    frozen = ("*.linear_fc?.weight", "*.linear_qkv.weight", "decoder.layers.0.*")
    case = replace(CASE, frozen=frozen)
    topology = Topology(1, 1, 4)
    results = run(train_and_meter, topology.world_size, case, topology)
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    assert len(spans(results, name)) < topology.dp
    assert [result["meters"]["matrices"] for result in results].count(0) == topology.dp - 1
    assert differences(truth(case), whole(results)) == []


@pytest.mark.parametrize("layer", [0, 1])
def test_stage_with_no_muon_matrix(layer: int) -> None:
    """All matrices of one of two stages are frozen; its other parameters go on."""
    frozen = tuple(f"decoder.layers.{layer}.*{m}" for m in ("fc?.weight", "qkv.weight", "j.weight"))
    case = replace(CASE, frozen=frozen)
    topology = Topology(2, 2, 2)
    results = run(train_and_meter, topology.world_size, case, topology)
    stages = {0: 0, 1: 0}
    for result in results:
        stages[result["rank"][1]] += result["meters"]["matrices"]
        if result["rank"][1] == layer:
            assert result["meters"] == {"matrices": 0, "flops": 0, "sent": 0}
    assert stages == {layer: 0, 1 - layer: 6}
    assert differences(truth(case), whole(results)) == []


def test_stage_with_nothing_to_train() -> None:
    """Megatron gives such a stage no optimizer at all; the other stage must not wait for it."""
    case = replace(CASE, frozen=("decoder.layers.1.*", "decoder.final*", "output_layer*"))
    assert differences(truth(case), trained(case, Topology(1, 2, 2))) == []


def test_frozen_parameter_keeps_its_value_and_has_no_state() -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    case = replace(CASE, frozen=(name,))
    result = trained(case, Topology(2, 1, 2))
    initial = whole_weight(case, name, (260, 96))
    assert torch.equal(result["params"][name], initial)
    assert name not in result["main"] and name not in result["exp_avg"]
    assert differences(truth(case), result) == []


# --- gradients -------------------------------------------------------------------------------


HUGE = 2.0**50  # times the gradients of all but one kind, whose norm is clipped to 1


def _moved(case: Case, grads: float) -> dict[str, float]:
    """How far one step takes each matrix, as a root mean square, with gradients so many times."""
    built = start(case, Topology())
    before = {name: param.detach().float().clone() for name, param in built.params.items()}
    set_schedule(built, 0)
    write_grads(built, 0)
    for name, param in built.params.items():
        param.main_grad.mul_(1.0 if "linear_fc1" in name else grads)
    ok, norm, _ = built.optimizer.step()
    assert ok and (grads == 1.0 or norm > 2.0**40)
    return {
        name: float((param.detach().float() - before[name]).square().mean().sqrt())
        for name, param in built.params.items()
        if name in muon_weights(case)
    }


def test_a_huge_global_norm_does_not_stall_muon() -> None:
    """All gradients but fc1's are huge, so the clip takes fc1's below 1e-12; its update is as large
    as ever. The clip's factor is no power of two, so directions differ by their rounding."""
    case = replace(CASE, steps=1, clip=1.0, weight_decay=0.0, bf16=False)
    (plain,), (clipped,) = run(_moved, 1, case, 1.0), run(_moved, 1, case, HUGE)
    for name, way in plain.items():
        assert clipped[name] == pytest.approx(way, rel=0.02), name


# --- once per step ---------------------------------------------------------------------------


def _two_steps(case: Case, topology: Topology, micro_batches: int) -> dict[str, Any]:
    """Real training steps; the flops that torch counts in forward-backward and in the step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from torch.utils.flop_counter import FlopCounterMode

    built = start(case, topology)
    counted: dict[str, Any] = {"backward": [], "step": [], "meters": []}
    for step in range(2):
        set_schedule(built, step)
        built.ddp.zero_grad_buffer()
        built.optimizer.zero_grad()
        with FlopCounterMode(display=False) as flops:
            get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=None,
                model=[built.ddp],
                num_microbatches=micro_batches,
                seq_length=SEQUENCE,
                micro_batch_size=2,
                forward_only=False,
            )
            counted["backward"].append(flops.get_total_flops())
        with FlopCounterMode(display=False) as flops:
            assert built.optimizer.step()[0]
            counted["step"].append(flops.get_total_flops())
        counted["meters"].append(meters(built))
    return counted


def _forward_step(_: Any, model: Any) -> Any:
    tokens = torch.randint(VOCAB, (2, SEQUENCE))
    positions = torch.arange(SEQUENCE).expand(2, -1)
    loss = model(tokens, positions, None, labels=tokens)
    return loss, lambda out: (out.float().mean(), {})


def test_newton_schulz_runs_once_per_step_not_per_micro_batch() -> None:
    case, topology = replace(CASE, steps=2), Topology(1, 1, 2)
    # Each of 5 iterations, m ≤ n: X Xᵀ 2 m m n, A A 2 m m m, B X 2 m m n.
    once = 0
    for shape in LAYER_SHAPES * case.layers:
        m, n = min(shape), max(shape)
        once += 5 * (2 * m * m * n + 2 * m * m * m + 2 * m * m * n)
    backward = {}
    for micro_batches in (1, 3):
        ranks = run(_two_steps, topology.world_size, case, topology, micro_batches)
        for step in range(2):
            assert sum(rank["step"][step] for rank in ranks) == once
            assert sum(rank["meters"][step]["flops"] for rank in ranks) == once
            total = sum(rank["meters"][step]["matrices"] for rank in ranks)
            assert total == len(LAYER_SHAPES) * case.layers
        backward[micro_batches] = ranks[0]["backward"][1]
    assert backward[3] == 3 * backward[1]
