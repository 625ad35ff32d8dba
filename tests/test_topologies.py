"""The plugin on any topology equals the plugin on one process, bit for bit.

Ten steps with new gradients each, written after the reduction and the same everywhere; the clip is
off, because a global norm sums in an order that depends on the topology. Parameters, main
parameters and all optimizer state are compared with ``torch.equal``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from gpt import Case, Topology, train, trained, truth
from ranks import run
from whole import Whole, differences

SHAPES = [(1, 1, 2), (1, 1, 3), (1, 1, 4), (2, 1, 1), (2, 1, 2), (2, 1, 4), (1, 2, 2), (2, 2, 2)]
BF16 = Case()
FP32 = Case(bf16=False, muon=(("ns_dtype", "fp32"),))
TIED = Case(tied=True)
GATED = Case(gated=True)
GROUPS = Case(faster=("*.linear_fc2.weight", "decoder.layers.1.*", "embedding.*"))


def check(case: Case, topology: Topology) -> Whole:
    """Compare with one process; what was computed is returned for further looks."""
    found = trained(case, topology)
    muon = found["main"].keys() - found["exp_avg_sq"].keys()
    assert len(muon) == 4 * case.layers  # qkv, proj, fc1, fc2 have Muon's state and not Adam's
    assert differences(truth(case), found) == []
    return found


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


def test_every_weight_moves() -> None:
    """Without this, comparing two runs that both do nothing would pass."""
    before, after = truth(replace(BF16, steps=0)), truth(BF16)
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


@pytest.mark.parametrize(
    "setting",
    [("split_qkv", False), ("homes", "local"), ("ns_dtype", "fp32"), ("nesterov", False)],
    ids=lambda setting: "=".join(map(str, setting)),
)
def test_settings(setting: tuple[str, object]) -> None:
    check(Case(muon=(setting,)), Topology(2, 1, 3))


def test_the_machinery_itself_with_plain_adam() -> None:
    """The machinery itself: Megatron's own AdamW, no plugin, must pass the same comparison."""
    case = Case(optimizer="adam", lr=1e-3)
    assert differences(truth(case), trained(case, Topology(2, 2, 2))) == []


# --- mutants of the plan: each must be noticed -----------------------------------------------


@contextmanager
def _changed_plan(change: Callable[..., Any]) -> Iterator[None]:
    """Within it the package makes its plan with ``change(make_plan, parameters, grid, config)``."""
    import megatron_muon.plan as plans

    original = plans.make_plan
    plans.make_plan = partial(change, original)
    try:
        yield
    finally:
        plans.make_plan = original


def wrong_piece() -> Any:
    """Two pieces of one parameter, equally long, on one rank, go to each other's place: the plan
    still covers every element once, and its own check accepts it."""

    def change(make_plan: Any, parameters: Any, grid: Any, config: Any) -> Any:
        plan = make_plan(parameters, grid, config)
        segments = list(plan.segments)
        for a, one in enumerate(segments):
            for b in range(a + 1, len(segments)):
                two = segments[b]
                same = (one.parameter, one.rank, one.elements.size)
                if same == (two.parameter, two.rank, two.elements.size):
                    segments[a] = replace(one, matrix=two.matrix, start=two.start)
                    segments[b] = replace(two, matrix=one.matrix, start=one.start)
                    changed = replace(plan, segments=tuple(segments))
                    changed.validate()
                    return changed
        raise AssertionError("the plan has no two pieces to swap")

    return _changed_plan(change)


def swapped_tp_order() -> Any:
    """Every rank takes its TP slice for the other TP rank's."""

    def change(make_plan: Any, parameters: Any, grid: Any, config: Any) -> Any:
        return make_plan(parameters, grid[::-1], config)

    return _changed_plan(change)


@pytest.mark.parametrize("case", [BF16, FP32], ids=["bf16", "fp32"])
def test_mutant_with_a_wrong_piece_is_noticed(case: Case) -> None:
    found = differences(truth(case), trained(case, Topology(2, 1, 2), wrong_piece))
    assert found and all("linear_qkv.weight" in name for name in found)


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
    found = differences(truth(case), trained(case, Topology(2, 1, 2), swapped_tp_order))
    assert {name.split(".")[-2] for name in found if name.startswith("main ")} >= noticed
