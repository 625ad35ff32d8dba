"""The plugin on any topology equals the plugin on one process, bit for bit.

Steps with new gradients each, written after the reduction and the same everywhere; the
clip is off, because a global norm sums in an order that depends on the topology.
Parameters, main parameters and all optimizer state are compared with ``torch.equal``.
Experts: see ``test_topologies_moe``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.models.gpt import (
    Case,
    Topology,
    build,
    check,
    on_ranks,
    runs_of,
    train,
    trained,
    truth,
)
from support.models.gpt_model import DOWN_PROJECTIONS
from support.ranks import run
from support.runs.cases import TIED, muon_weights
from support.runs.mutants import believed_marks, swapped_tp_order, wrong_piece
from support.runs.topologies import (
    DP4_INSTANCES2,
    PP2,
    TP2,
    TP2_DP2,
)
from support.runs.whole import differences

BF16 = Case()
GATED = Case(gated=True)
UPDATE_NORM = Case().with_muon(scale_mode="update_norm")
IN_COLUMNS = (("*.linear_proj.*", "cols:48,48"),)
WARMING = Case().with_muon(
    momentum_warmup=2, cautious_decay=True, independent_decay=True
)
FP32 = Case(bf16=False).with_muon(ns_dtype="fp32")
FP16 = Case(bf16=False, fp16=True, steps=5)  # the loss scale grows and falls
OVERFLOW = replace(FP16, overflow=((1, "*.layers.1.mlp.linear_fc2.weight"),))
GROUPS = Case(faster=("*.linear_fc2.weight", "decoder.layers.1.*", "embedding.*"))
DEEP = Case(layers=4)
STEP_OVERLAP = Topology.of("pp2 dp2 overlap chunks2 step_overlap")
COLUMN = Case(mla="column")
DUPLICATED = Case(mla="duplicated")
DEEPSEEKS = replace(DUPLICATED, moe=True, grouped="te", gated=True)
MTP = Case(mtp=True)
# Where TP leaves a rank a vector of a matrix, or cuts inside a query group: whose a
# weight is, how it splits and its scale follow from whole matrices alone.
NARROW = Case(ffn=2)  # fc1 is (2, 96): (1, 96) on each of two TP ranks
ONE_ROW = Case(heads=96, groups=1)  # K and V are (1, 96)
ONE_GROUP = Case(groups=1)  # q q q q | q q k v
HALF_OF_K = replace(ONE_GROUP, heads=4)  # on each of the last two of four
GATED_GROUP = Case(heads=4, groups=1, output_gate=True)
ADAM = Case(optimizer="adam", lr=1e-3)
ADAM_MOE = replace(ADAM, moe=True, gated=True)
SETTINGS = (
    ("split_qkv", False),
    ("homes", "local"),
    ("ns_dtype", "fp32"),
    ("nesterov", False),
    ("ns_iteration", "gram"),
    ("ns_dtype", "fp16"),
)


# By name: the case, its topologies, and those that are slow: each has a sibling that is
# not.
RUNS = {
    "bf16": (
        BF16,
        (
            "tp2, pp2 dp2, dp2 overlap, dp3 overlap, dp4 overlap, tp2 overlap, "
            "tp2 dp2 overlap, pp2 dp2 overlap, tp2 dp4 overlap, "
            "tp2 pp2 dp2 overlap"
        ),
        (
            "dp2, dp3, dp4, tp2 dp2, tp2 dp4, tp2 pp2 dp2, tp2 pp2 dp4, "
            "tp2 pp2 dp4 overlap"
        ),
    ),
    "fp32": (
        FP32,
        "tp2, tp2 dp2",
        (
            "dp2, dp3, dp4, pp2 dp2, tp2 dp4, tp2 pp2 dp2, dp2 overlap, "
            "dp3 overlap, dp4 overlap, tp2 overlap, tp2 dp2 overlap, "
            "pp2 dp2 overlap, tp2 dp4 overlap, tp2 pp2 dp2 overlap"
        ),
    ),
    "sp": (BF16, "tp2 pp2 dp2 sp", "tp2 dp2 sp"),
    "cp": (BF16, "cp2, overlap cp2, tp2 overlap cp2", "tp2 cp2"),
    "cp-fp32": (FP32, "", "cp2, tp2 cp2, overlap cp2, tp2 overlap cp2"),
    "layers": (Case(bf16=False, layers=4), "tp2 pp2 dp2"),
    "tied": (Case(tied=True), "tp2 dp2, pp2 dp2", "tp2 pp2 dp2"),
    "gated": (GATED, "tp2 dp2", "tp2"),
    "groups": (
        GROUPS,
        "tp2 pp2 dp2 overlap",
        "tp2 pp2 dp2, dp3, dp3 overlap",
    ),
    "chunks": (
        DEEP,
        "pp2 chunks2, tp2 pp2 dp2 overlap chunks2 step_overlap",
        (
            "pp2 dp2 chunks2, pp2 dp2 overlap chunks2, "
            "pp2 dp2 overlap chunks2 step_overlap"
        ),
    ),
    "chunks-tied": (
        replace(DEEP, tied=True),
        "",
        "pp2 dp2 chunks2, pp2 dp2 overlap chunks2 step_overlap",
    ),
    "instances": (BF16, "dp4 overlap instances2", "dp4 instances2"),
    "instances-fp32": (FP32, "", "dp4 instances2, dp4 overlap instances2"),
    "instances-with": (BF16, "tp2 dp4 instances2, cp4 instances2"),
    "fp16": (FP16, "tp2 pp2 dp2 overlap", "tp2 dp2"),
    "overflow": (OVERFLOW, "tp2 dp2", "pp2 dp2"),  # of one element, so on one rank
    "bf16-gradients": (Case(fp32_grads=False), "tp2 dp2", "pp2 dp2 overlap"),
    **{
        "=".join(map(str, setting)): (Case().with_muon(**dict([setting])), "tp2 dp3")
        for setting in SETTINGS
    },
    "warm-up-and-decays": (WARMING, "tp2 dp2, dp3 overlap", "tp2 pp2 dp2"),
    "update-norm": (UPDATE_NORM, "tp2 dp2, dp3 overlap", "tp2 pp2 dp2"),
    "update-norm-columns": (UPDATE_NORM.with_muon(splits=IN_COLUMNS), "tp2 dp3"),
    "update-norm-experts": (replace(UPDATE_NORM, moe=True), "tp2 dp2 sp ep2"),
    "mla-column": (COLUMN, "tp2 dp2, tp2 pp2 dp2", "tp2"),
    "mla": (DUPLICATED, "tp2 dp2, tp2 pp2 dp2", "tp2"),
    "mla-column-fp32": (replace(FP32, mla="column"), "", "tp2 dp2 overlap sp"),
    "mla-fp32": (replace(FP32, mla="duplicated"), "tp2 dp2 overlap sp"),
    "mla-experts": (DEEPSEEKS, "tp2 dp2 sp ep2"),
    "mtp": (MTP, "pp2", "tp2 pp2 dp2"),
    "mtp-tied": (replace(MTP, tied=True), "pp2, tp2 pp2 dp2"),
    "narrow": (NARROW, "tp2 dp2"),
    "narrow-gated": (replace(NARROW, gated=True), "tp2 dp2"),
    "one-row": (ONE_ROW, "tp2"),
    "one-group": (ONE_GROUP, "tp2 pp2 dp2 overlap", "tp2 dp2"),
    # q q q | q k v | …
    "two-groups": (replace(ONE_GROUP, heads=8, groups=2), "tp4"),
    "half-of-k": (HALF_OF_K, "", "tp4"),
    "half-of-k-fp32": (replace(FP32, heads=4, groups=1), "tp4 dp2"),
    "gated-group": (GATED_GROUP, "tp2 dp2"),
    "two-gated-groups": (replace(GATED_GROUP, heads=8, groups=2), "tp4"),
    "group-whole": (ONE_GROUP.with_muon(split_qkv=False), "tp2 dp2"),
    # Megatron's own AdamW passes the comparison: the others rest on it
    "adam": (ADAM, "dp4 instances2"),
    "adam-chunks": (replace(ADAM, layers=4), "pp2 dp2 overlap chunks2 step_overlap"),
    "adam-mtp": (replace(ADAM, mtp=True, tied=True), "tp2 pp2"),
    "adam-fp16": (replace(ADAM, bf16=False, fp16=True), "", "tp2 dp2"),
    "adam-mla": (
        replace(ADAM_MOE, grouped="te", mla="duplicated"),
        "",
        "tp2 dp2 ep2",
    ),
    "adam-experts": (ADAM_MOE, "tp2 dp2 overlap sp ep2 etp1"),
}


@pytest.mark.parametrize("case, topology", runs_of(RUNS))
def test_any_topology_equals_one_process(case: Case, topology: Topology) -> None:
    check(case, topology)


def test_one_process_repeats_itself() -> None:
    assert differences(truth(BF16), trained(BF16, Topology(overlap=True))) == []


# --- what this rests on ---------------------------------------------------------------

MOES = {f"moe-{kind}": Case(moe=True, grouped=kind) for kind in ("", "legacy", "te")}
MOVING = {
    "bf16": BF16,
    **MOES,
    "mla-column": COLUMN,
    "mla": DUPLICATED,
    "one-row": ONE_ROW,
}
MOVING |= {"mtp": MTP, "mtp-tied": replace(MTP, tied=True)}


@pytest.mark.parametrize("name", MOVING)
def test_every_weight_moves(name: str) -> None:
    """Without this, comparing two runs that both do nothing would pass.

    All but one element in a thousand, which rounding may leave where it was.
    """
    case = MOVING[name]
    before = truth(replace(case, steps=0))
    after = truth(case)
    assert muon_weights(case) <= before["main"].keys()
    for weight, start in before["main"].items():
        stay = int((start == after["main"][weight]).sum())
        assert stay <= start.numel() // 1000, weight


def test_overlap_really_has_several_buckets() -> None:
    topology = Topology.of("tp2 pp2 dp2 overlap")
    results = on_ranks(train, replace(BF16, steps=0), topology)
    buckets = {result["rank"][1]: result["buckets"] for result in results}
    assert buckets[0][0] >= 3  # first stage: Megatron cuts by bucket_size
    assert buckets[1] == [1]  # later stages: Megatron keeps one


def test_step_overlap_really_has_two_dense_optimizers() -> None:
    case = Case(layers=4, steps=0)
    for topology, number in (
        (STEP_OVERLAP, 2),
        (replace(STEP_OVERLAP, step_overlap=False), 1),
    ):
        assert [r["optimizers"] for r in on_ranks(train, case, topology)] == [
            number
        ] * 4


def test_instances_really_shard_over_half_of_the_ranks() -> None:
    results = on_ranks(train, replace(BF16, steps=0), DP4_INSTANCES2)
    owners = [set(result["owners"].values()) for result in results]
    assert owners == [{(0, 1)}, {(0, 1)}, {(2, 3)}, {(2, 3)}]


def test_bf16_gradients_are_others_than_fp32_ones() -> None:
    """Without this, an option that has no effect would pass."""
    assert differences(truth(BF16), truth(replace(BF16, fp32_grads=False)))


def test_overflow_changes_nothing_but_the_loss_scale() -> None:
    one_step = replace(FP16, steps=1)
    two_steps = replace(OVERFLOW, steps=2)
    assert differences(truth(one_step), truth(two_steps)) == []
    for result in on_ranks(train, replace(OVERFLOW, steps=6), TP2_DP2):
        scales = result["log"]["loss_scales"]
        # halved by the overflow in step 1, doubled after three good steps
        assert scales == [2.0**12, 2.0**12, 2.0**11, 2.0**11, 2.0**11, 2.0**12]


def _marks() -> dict[str, tuple[bool, int, tuple[int, ...]]]:
    built = build(DUPLICATED, TP2)
    return {
        name: (param.tensor_model_parallel, param.partition_dim, tuple(param.shape))
        for name, param in built.params.items()
        if name.endswith(DOWN_PROJECTIONS)
    }


def test_duplicated_weights_are_really_marked_as_partitioned() -> None:
    for marks in run(_marks, 2):
        assert len(marks) == 2 * DUPLICATED.layers
        assert {mark[:2] for mark in marks.values()} == {(True, 0)}
        whole = truth(DUPLICATED)["params"]
        assert all(shape == whole[name].shape for name, (*_, shape) in marks.items())


def test_column_parallel_and_duplicated_down_projections_are_the_same_model() -> None:
    """In one process the two differ by marks only."""
    assert differences(truth(COLUMN), truth(DUPLICATED)) == []


def test_last_stage_really_has_a_copy_of_the_embedding() -> None:
    for tied in (False, True):
        first, last = on_ranks(_names, replace(MTP, tied=tied), PP2)
        assert TIED in first and TIED in last
        assert "output_layer.weight" not in first
        assert ("output_layer.weight" in last) is not tied


def _names(case: Case, topology: Topology) -> set[str]:
    return set(build(case, topology).params)


# --- mutants of the plan: each must be noticed ----------------------------------------


@pytest.mark.parametrize("case", [BF16, FP32])
def test_mutant_with_a_wrong_piece_is_noticed(case: Case) -> None:
    unlike = differences(truth(case), trained(case, TP2_DP2, wrong_piece))
    assert unlike and all("linear_qkv.weight" in name for name in unlike)


@pytest.mark.parametrize(
    "case, noticed",
    [(BF16, {"linear_proj"}), (FP32, {"linear_proj", "linear_fc1", "linear_fc2"})],
)
def test_mutant_with_swapped_tp_order_is_noticed(case: Case, noticed: set[str]) -> None:
    """Newton-Schulz commutes with permutations of rows and columns, so only rounding
    tells: this is what canonical order is for, and only a bitwise comparison sees it.
    In bf16 that needs a sum that is rounded differently when its halves change places,
    which the long side of fc1 and fc2 (260 = two blocks of the fp32 product) does not.
    """
    unlike = differences(truth(case), trained(case, TP2_DP2, swapped_tp_order))
    assert {
        name.split(".")[-2] for name in unlike if name.startswith("main ")
    } >= noticed


def test_mutant_that_believes_the_marks_is_noticed() -> None:
    unlike = differences(truth(DUPLICATED), trained(DUPLICATED, TP2, believed_marks))
    assert unlike and all(name.endswith(DOWN_PROJECTIONS) for name in unlike)
