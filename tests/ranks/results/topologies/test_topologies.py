"""The plugin on any topology equals the plugin on one process, bit for bit: dense models.

Steps with new gradients each, written after the reduction and the same everywhere; the clip is
off, because a global norm sums in an order that depends on the topology. Parameters, main
parameters and all optimizer state are compared with ``torch.equal``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.models.gpt import Case, Topology, check, train, trained, truth
from support.ranks import run
from support.runs.cases import muon_weights
from support.runs.mutants import swapped_tp_order, wrong_piece
from support.runs.whole import differences

SHAPES = [(1, 1, 2), (1, 1, 3), (1, 1, 4), (2, 1, 1), (2, 1, 2), (2, 1, 4), (1, 2, 2), (2, 2, 2)]
BF16 = Case()
FP32 = Case(bf16=False, muon=(("ns_dtype", "fp32"),))
FP16 = Case(bf16=False, fp16=True)
TIED = Case(tied=True)
GATED = Case(gated=True)
MOES = [Case(moe=True, steps=5, grouped=grouped) for grouped in ("", "legacy", "te")]
MLAS = [Case(mla=mla, steps=5) for mla in ("column", "duplicated")]
MTPS = [Case(mtp=True, steps=5, tied=tied) for tied in (False, True)]
GROUPS = Case(faster=("*.linear_fc2.weight", "decoder.layers.1.*", "embedding.*"))


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("case", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_any_topology_equals_one_process(
    shape: tuple[int, int, int], case: Case, overlap: bool
) -> None:
    check(case, Topology(*shape, overlap=overlap))


def test_more_layers_than_ranks_and_bf16_newton_schulz_of_an_fp32_model() -> None:
    check(Case(bf16=False, layers=4), Topology(2, 2, 2))


def test_one_process_repeats_itself() -> None:
    assert differences(truth(BF16), trained(BF16, Topology(overlap=True))) == []


@pytest.mark.parametrize(
    "case",
    [BF16, *MOES, *MLAS, *MTPS],
    ids=["dense", "sequential", "legacy", "te", "column", "duplicated", "mtp", "mtp-tied"],
)
def test_every_weight_moves(case: Case) -> None:
    """Without this, comparing two runs that both do nothing would pass."""
    before, after = truth(replace(case, steps=0)), truth(case)
    assert muon_weights(case) <= before["main"].keys()
    same = [n for n, w in before["main"].items() if bool((w == after["main"][n]).any())]
    assert same == []


def test_overlap_really_has_several_buckets() -> None:
    topology = Topology(2, 2, 2, overlap=True)
    results = run(train, topology.world_size, replace(BF16, steps=0), topology)
    buckets = {result["rank"][1]: result["buckets"] for result in results}
    assert buckets[0][0] >= 3  # first stage: Megatron cuts by bucket_size
    assert buckets[1] == [1]  # later stages: Megatron keeps one


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2), (2, 2, 2)], ids=str)
def test_tied_embeddings(shape: tuple[int, int, int]) -> None:
    check(TIED, Topology(*shape))


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 2)], ids=str)
def test_gated_fc1_is_assembled_in_tp1_order(shape: tuple[int, int, int]) -> None:
    check(GATED, Topology(*shape))


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_groups_with_their_own_lr_and_decay(shape: tuple[int, int, int], overlap: bool) -> None:
    check(GROUPS, Topology(*shape, overlap=overlap))


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 2)], ids=str)
def test_sequence_parallel(shape: tuple[int, int, int]) -> None:
    check(BF16, Topology(*shape, sequence_parallel=True))


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("case", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("tp", [1, 2])
def test_context_parallel(tp: int, case: Case, overlap: bool) -> None:
    check(case, Topology(tp=tp, cp=2, overlap=overlap))


CHUNKS = Topology(pp=2, chunks=2)


@pytest.mark.parametrize(
    "topology",
    [
        CHUNKS,
        replace(CHUNKS, dp=2),
        replace(CHUNKS, dp=2, overlap=True),
        replace(CHUNKS, dp=2, overlap=True, step_overlap=True),
        replace(CHUNKS, tp=2, dp=2, overlap=True, step_overlap=True),
    ],
    ids=str,
)
def test_model_chunks(topology: Topology) -> None:
    check(Case(layers=4, steps=5), topology)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "step-overlap"])
def test_model_chunks_with_tied_embeddings(overlap: bool) -> None:
    topology = replace(CHUNKS, dp=2, overlap=overlap, step_overlap=overlap)
    check(Case(layers=4, steps=5, tied=True), topology)


def test_step_overlap_really_has_two_dense_optimizers() -> None:
    topology = replace(CHUNKS, dp=2, overlap=True, step_overlap=True)
    case = Case(layers=4, steps=0)
    assert [r["optimizers"] for r in run(train, 4, case, topology)] == [2] * 4
    results = run(train, 4, case, replace(topology, step_overlap=False))
    assert [r["optimizers"] for r in results] == [1] * 4


INSTANCES = Topology(dp=4, instances=2)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("case", [BF16, FP32], ids=["bf16", "fp32"])
def test_two_optimizer_instances(case: Case, overlap: bool) -> None:
    check(case, replace(INSTANCES, overlap=overlap))


@pytest.mark.parametrize(
    "topology", [replace(INSTANCES, tp=2), Topology(cp=4, instances=2)], ids=str
)
def test_two_optimizer_instances_with_others(topology: Topology) -> None:
    check(replace(BF16, steps=5), topology)


def test_instances_really_shard_over_half_of_the_ranks() -> None:
    results = run(train, 4, replace(BF16, steps=0), INSTANCES)
    owners = [set(result["owners"].values()) for result in results]
    assert owners == [{(0, 1)}, {(0, 1)}, {(2, 3)}, {(2, 3)}]


# --- precisions ------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [Topology(2, 1, 2), Topology(2, 2, 2, overlap=True)], ids=str)
def test_fp16(topology: Topology) -> None:
    check(FP16, topology)


@pytest.mark.parametrize("topology", [Topology(2, 1, 2), Topology(1, 2, 2, overlap=True)], ids=str)
def test_bf16_gradients(topology: Topology) -> None:
    check(Case(fp32_grads=False), topology)


def test_bf16_gradients_are_others_than_fp32_ones() -> None:
    """Without this, an option that has no effect would pass."""
    assert differences(truth(BF16), truth(replace(BF16, fp32_grads=False)))


OVERFLOW = replace(FP16, overflow=((1, "*.layers.1.mlp.linear_fc2.weight"),))


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)], ids=str)
def test_overflow_skips_the_step_on_every_rank(shape: tuple[int, int, int]) -> None:
    """The inf is in one element, so on one rank; take_step wants the same answer from all."""
    check(OVERFLOW, Topology(*shape))


def test_overflow_changes_nothing_but_the_loss_scale() -> None:
    one_step, two_steps = replace(FP16, steps=1), replace(OVERFLOW, steps=2)
    assert differences(truth(one_step), truth(two_steps)) == []
    for result in run(train, 4, replace(OVERFLOW, steps=6), Topology(2, 1, 2)):
        scales = result["log"]["loss_scales"]
        # halved by the overflow in step 1, doubled after three good steps
        assert scales == [2.0**12, 2.0**12, 2.0**11, 2.0**11, 2.0**11, 2.0**12]


# --- large -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_16_ranks(overlap: bool) -> None:
    check(BF16, Topology(2, 2, 4, overlap=overlap))


@pytest.mark.parametrize(
    "setting",
    [
        ("split_qkv", False),
        ("homes", "local"),
        ("link_gbytes", 1e-3),
        ("ns_dtype", "fp32"),
        ("nesterov", False),
        ("ns_iteration", "gram"),
        ("ns_dtype", "fp16"),
    ],
    ids=lambda setting: "=".join(map(str, setting)),
)
def test_settings(setting: tuple[str, object]) -> None:
    check(Case(muon=(setting,)), Topology(2, 1, 3))


# --- mutants of the plan: each must be noticed -----------------------------------------------


@pytest.mark.parametrize("case", [BF16, FP32], ids=["bf16", "fp32"])
def test_mutant_with_a_wrong_piece_is_noticed(case: Case) -> None:
    unlike = differences(truth(case), trained(case, Topology(2, 1, 2), wrong_piece))
    assert unlike and all("linear_qkv.weight" in name for name in unlike)


@pytest.mark.parametrize(
    ("case", "noticed"),
    [(BF16, {"linear_proj"}), (FP32, {"linear_proj", "linear_fc1", "linear_fc2"})],
    ids=["bf16", "fp32"],
)
def test_mutant_with_swapped_tp_order_is_noticed(case: Case, noticed: set[str]) -> None:
    """Newton-Schulz commutes with permutations of rows and columns, so only rounding tells: this
    is what canonical order is for, and only a bitwise comparison sees it. In bf16 that needs a sum
    that is rounded differently when its halves change places, which the long side of fc1 and fc2
    (260 = two blocks of the fp32 product) does not."""
    unlike = differences(truth(case), trained(case, Topology(2, 1, 2), swapped_tp_order))
    assert {name.split(".")[-2] for name in unlike if name.startswith("main ")} >= noticed
