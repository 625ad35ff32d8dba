"""As test_topologies, for mixtures of experts: the experts have TP and DP groups of
their own and a second DistributedOptimizer. Router and shared experts are in the dense
one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.models.gpt import (
    Case,
    Topology,
    check,
    on_ranks,
    runs_of,
    train,
    trained,
    truth,
)
from support.runs.cases import EXPERTS, HIDDEN, MOE_FFN, muon_weights
from support.runs.mutants import swapped_ep_ranks
from support.runs.topologies import (
    DP2_EP2,
    DP4_EP4,
    TP2_DP2_EP2,
    TP2_EP2_ETP1,
)
from support.runs.whole import differences

MOE = Case(moe=True)
FP32 = replace(MOE, bf16=False).with_muon(ns_dtype="fp32")
LEGACY = replace(MOE, grouped="legacy")
TE = replace(MOE, grouped="te")
# Megatron wants sequence parallelism of a mixture of experts under TP.
EP2_EDP2 = replace(
    TP2_EP2_ETP1, dp=2
)  # two expert-DP ranks, and expert TP differs from TP
EP2_EDP3 = Topology.of("dp6 ep2")  # thirds of the experts' buffers end within matrices
FP16 = replace(MOE, bf16=False, fp16=True, steps=5)
EXPERTS_OVERFLOW = replace(FP16, overflow=((1, "*.local_experts.3.linear_fc1.weight"),))
ROUTERS_OVERFLOW = replace(FP16, overflow=((1, "*.router.weight"),))
FASTER = ("*.local_experts.2.*", "*.router.weight", "*.layers.1.*.shared_experts.*")
# By name: the case, its topologies, and those that are slow: each has a sibling that is
# not.
RUNS = {
    # on tp2 dp2 sp, without EP, they are in the dense optimizer, with a TP group that
    # has the size of TP
    "sequential": (
        MOE,
        (
            "dp6 ep2, cp2 ep2, pp2 dp2 ep2, tp2 dp2 sp ep2, "
            "tp2 dp2 overlap sp ep2 etp1, dp4 ep4, pp2 dp4 overlap ep2, "
            "dp4 overlap ep2 instances2, tp2 dp2 sp"
        ),
        (
            "dp2 ep2, tp2 sp ep2 etp1, tp2 dp2 sp ep2 etp1, pp2 dp4 ep2, "
            "dp4 ep2 instances2"
        ),
    ),
    "fp32": (FP32, "tp2 dp2 sp ep2", "dp2 ep2, tp2 sp ep2 etp1"),
    "gated": (replace(MOE, gated=True), "tp2 dp2 sp ep2"),
    "legacy": (LEGACY, "tp2 dp2 sp ep2", "tp2 sp ep2 etp1, dp6 ep2"),
    "te": (TE, "tp2 dp2 sp ep2, dp6 ep2", "tp2 sp ep2 etp1"),
    "legacy-gated": (replace(LEGACY, gated=True), "tp2 dp2 sp ep2"),
    "te-gated": (replace(TE, gated=True), "", "tp2 dp2 sp ep2"),
    "layers": (
        replace(MOE, layers=4),
        "pp2 dp2 overlap ep2 chunks2",
        "pp2 dp2 ep2 chunks2, pp2 dp2 overlap ep2, pp2 dp2 ep2",
    ),
    "groups": (replace(MOE, faster=FASTER), "tp2 dp2 sp ep2 etp1"),
    # no token came to an expert: it only decays
    "no-gradient": (
        replace(MOE, zero_grads=("*.local_experts.3.*",)),
        "tp2 dp2 sp ep2 etp1",
    ),
    # Megatron has a loss scaler in each optimizer; without a remedy they would part
    "overflow": (EXPERTS_OVERFLOW, "tp2 dp2 sp ep2", "dp2 ep2"),
    "routers-overflow": (ROUTERS_OVERFLOW, "", "dp2 ep2, tp2 dp2 sp ep2"),
}


@pytest.mark.parametrize("case, topology", runs_of(RUNS))
def test_any_topology_equals_one_process(case: Case, topology: Topology) -> None:
    check(case, topology)


@pytest.mark.parametrize("round_bytes", [None, 1 << 14])
def test_experts_that_leave_their_rank_for_a_dense_matrix(
    round_bytes: int | None,
) -> None:
    """``test_meters`` shows that they do."""
    few_dense = ("*.linear_proj.weight", "*.router.weight", "*.shared_experts.*")
    muon = (
        ("split_qkv", False),
        ("muon_exclude", few_dense),
        ("round_bytes", round_bytes),
    )
    case = replace(MOE, muon=muon)
    assert not differences(trained(case, DP4_EP4), truth(case))


# --- what the tests above rest on -----------------------------------------------------


@pytest.mark.parametrize(
    "topology, owners",
    [
        (DP2_EP2, {(0,), (1,)}),
        (TP2_EP2_ETP1, {(0,), (1,)}),
        (TP2_DP2_EP2, {(0,), (1,), (2,), (3,)}),
        (EP2_EDP2, {(0, 2), (1, 3)}),
        (EP2_EDP3, {(0, 2, 4), (1, 3, 5)}),
        (Topology.of("dp4 ep2 instances2"), {(0,), (1,), (2,), (3,)}),
    ],
)
def test_experts_really_have_their_own_optimizer_and_owners(
    topology: Topology, owners: set[tuple[int, ...]]
) -> None:
    results = on_ranks(train, replace(MOE, steps=0), topology)
    assert [result["optimizers"] for result in results] == [2] * topology.world_size
    expert = ".local_experts."
    assert {
        o for r in results for name, o in r["owners"].items() if expert in name
    } == owners
    for result in results:
        local = {
            name.split(expert)[1][0] for name in result["params"] if expert in name
        }
        assert len(local) == EXPERTS // topology.ep


@pytest.mark.parametrize("case", [MOE, LEGACY, TE])
def test_matrices_of_experts_are_really_cut_over_expert_dp_ranks(case: Case) -> None:
    """Shards that all end between matrices would not show what becomes of a cut one."""
    results = on_ranks(train, replace(case, steps=0), EP2_EDP3)
    assert any(
        start % (HIDDEN * MOE_FFN)
        for result in results
        for name, (start, _, _) in result["shards"].items()
        if ".mlp.experts." in name
    )


# --- mutants of the experts' plan: each must be noticed -------------------------------


@pytest.mark.parametrize("topology", [TP2_DP2_EP2, EP2_EDP3])
@pytest.mark.parametrize("case", [MOE, LEGACY])
def test_mutant_with_swapped_ep_ranks_is_noticed(
    case: Case, topology: Topology
) -> None:
    unlike = differences(truth(case), trained(case, topology, swapped_ep_ranks))
    weights = {name.split(" ")[1] for name in unlike}
    experts = {name for name in muon_weights(case) if ".mlp.experts." in name}
    assert weights and weights <= experts
    if topology == TP2_DP2_EP2:  # a part of every expert went wrong
        assert weights == experts
