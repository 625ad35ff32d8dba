"""Where a plan is at its edges, and gradients that are unusual."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from support.models.gpt import (
    Case,
    Topology,
    held,
    on_ranks,
    stepped,
    train,
    trained,
    truth,
    whole_weight,
)
from support.runs.topologies import DP4, PP2_DP2, TP2_DP2, TP2_DP3, TP2_PP2_DP2
from support.runs.whole import differences, whole

MATRICES = ("*.linear_qkv.weight", "*.linear_proj.weight", "*.linear_fc1.weight")
CASE = Case().with_muon(ns_dtype="fp32")


def train_and_meter(case: Case, topology: Topology) -> dict[str, Any]:
    import megatron_muon

    built = stepped(case, topology)
    meter = megatron_muon.meter(built.optimizer)
    sent = meter.gather_bytes + meter.scatter_bytes
    counts = {"matrices": meter.matrices, "flops": meter.ns_flops, "sent": sent}
    return {**held(built), "meters": counts}


def spans(results: list[dict[str, Any]], name: str) -> list[tuple[int, int]]:
    """[start, stop) of a parameter on each rank that owns some of it."""
    return [
        result["shards"][name][:2] for result in results if name in result["shards"]
    ]


# --- shards ---------------------------------------------------------------------------


def test_shard_cut_through_the_middle_of_a_row() -> None:
    results = on_ranks(train, CASE, TP2_DP3)
    row_length = {
        "linear_proj": 48,
        "linear_qkv": 96,
        "linear_fc1": 96,
        "linear_fc2": 130,
    }
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
    case = replace(
        CASE, frozen=(*MATRICES, "*bias", "*layernorm*", "embedding*", "output*")
    )
    results = on_ranks(train_and_meter, case, DP4)
    held_by_name = {
        name: len(spans(results, name))
        for result in results
        for name in result["shards"]
    }
    assert set(held_by_name) == {
        f"decoder.layers.{i}.mlp.linear_fc2.weight" for i in (0, 1)
    }
    one = replace(case, frozen=(*case.frozen, "decoder.layers.0.*"))
    only = on_ranks(train_and_meter, one, DP4)
    assert len(spans(only, "decoder.layers.1.mlp.linear_fc2.weight")) == 4
    for each, got in ((case, results), (one, only)):
        assert differences(truth(each), whole(got)) == []


def test_rank_with_no_muon_piece() -> None:
    """Only one small matrix is trained beside the embedding and the output layer."""
    frozen = ("*.linear_fc?.weight", "*.linear_qkv.weight", "decoder.layers.0.*")
    case = replace(CASE, frozen=frozen)
    topology = DP4
    results = on_ranks(train_and_meter, case, topology)
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    assert len(spans(results, name)) < topology.dp
    assert [result["meters"]["matrices"] for result in results].count(
        0
    ) == topology.dp - 1
    assert differences(truth(case), whole(results)) == []


@pytest.mark.parametrize("layer", [0, 1])
def test_stage_with_no_muon_matrix(layer: int) -> None:
    """All matrices of one of two stages are frozen; its other parameters go on."""
    frozen = tuple(
        f"decoder.layers.{layer}.*{m}" for m in ("fc?.weight", "qkv.weight", "j.weight")
    )
    case = replace(CASE, frozen=frozen)
    results = on_ranks(train_and_meter, case, TP2_PP2_DP2)
    stages = {0: 0, 1: 0}
    for result in results:
        stages[result["rank"][1]] += result["meters"]["matrices"]
        if result["rank"][1] == layer:
            assert result["meters"] == {"matrices": 0, "flops": 0, "sent": 0}
    assert stages == {layer: 0, 1 - layer: 6}
    assert differences(truth(case), whole(results)) == []


def test_stage_with_nothing_to_train() -> None:
    """Megatron gives such a stage no optimizer at all; the other stage must not wait
    for it.
    """
    case = replace(
        CASE, frozen=("decoder.layers.1.*", "decoder.final*", "output_layer*")
    )
    assert differences(truth(case), trained(case, PP2_DP2)) == []


def test_frozen_parameter_keeps_its_value_and_has_no_state() -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    case = replace(CASE, frozen=(name,))
    result = trained(case, TP2_DP2)
    initial = whole_weight(case, name, (260, 96))
    assert torch.equal(result["params"][name], initial)
    assert name not in result["main"] and name not in result["exp_avg"]
    assert differences(truth(case), result) == []
