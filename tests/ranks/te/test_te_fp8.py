"""Weights in fp8 (--fp8-param-gather): the step is that of one process, in bits.

The weights are Transformer Engine's Float8Tensor and Float8BlockwiseQTensor; quantizing
is the stub's. fp8 products are not in the stub, so nothing is computed with them:
gradients are written, as everywhere here. Tensorwise and blockwise a TP rank scales its
slice by itself, so that weights, other than main parameters and momentum, have the bits
of one process only without TP.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints.resharding import check_resharded
from support.checkpoints.saving import (
    formats,
    load,
    reading_the_other,
    save,
    spoil,
    unequal,
)
from support.installed import VERSION
from support.marks import in_each_format, needs_te
from support.models.gpt import (
    Case,
    Topology,
    build,
    check,
    error_of_optimizer,
    held,
    on_ranks,
    prepare_step,
    start,
    stepped,
    take_step,
    trained,
    truth,
)
from support.ranks import run
from support.runs.topologies import (
    DP2,
    DP2_OVERLAP,
    DP3,
    DP3_OVERLAP,
    DP4_EP2,
    ONE,
    PP2_DP2_CHUNKS2,
    PP2_DP3_OVERLAP,
    TP2_DP2_EP2,
    TP2_DP2_SP,
    TP2_PP2_DP2_OVERLAP_SP,
)
from support.runs.whole import differences, of_optimizer, whole

pytestmark = needs_te

FP8 = Case(fp8="delayed")
MOE = replace(FP8, moe=True, grouped="te")
SP = {"sequence_parallel": True}
# Several blocks of 128 rows in fc1, of which the edges of shards cut some.
OTHERS = [replace(FP8, fp8=recipe, ffn=288) for recipe in ("tensorwise", "blockwise")]
# A bucket's weights are gathered in bf16 through the memory of its gradients; slices of
# 32.
MX = replace(FP8, fp8="mxfp8", ffn=256)
by_other_recipes = pytest.mark.parametrize("case", OTHERS)


@pytest.mark.parametrize(
    "case, topology",
    [
        (FP8, TP2_PP2_DP2_OVERLAP_SP),
        (replace(FP8, gated=True), DP3),
        (replace(FP8, layers=4), PP2_DP2_CHUNKS2),
        (replace(MOE, gated=True), TP2_DP2_EP2),
        (replace(FP8, mla="duplicated"), TP2_DP2_SP),
    ],
)
def test_a_topology_equals_one_process(case: Case, topology: Topology) -> None:
    check(case, topology)


@by_other_recipes
def test_by_other_recipes_data_parallel_ranks_have_the_weights_of_one(
    case: Case,
) -> None:
    check(case, DP3_OVERLAP)


@by_other_recipes
def test_by_other_recipes_a_topology_has_the_state_of_one_process(case: Case) -> None:
    for each in (case, replace(case, moe=True, grouped="te")):
        topology = Topology(2, 1 if each.moe else 2, 2, ep=2 if each.moe else 1, **SP)
        assert (
            differences(
                of_optimizer(truth(each)), of_optimizer(trained(each, topology))
            )
            == []
        )


@pytest.mark.parametrize("topology", [DP3, Topology.of("pp2 dp2 overlap")])
def test_weights_that_travel_through_the_memory_of_gradients(
    topology: Topology,
) -> None:
    if VERSION < (0, 19):
        (said,) = run(_refused, 1, "mxfp8")
        assert (
            "does not support fp8_param_gather with fp8_recipe=mxfp8 before core 0.19"
            in said
        )
        return
    check(replace(MX, fp32_grads=topology.overlap), topology)


def _waited() -> list[dict[str, Any]]:
    """What ranks hold once they have waited for parameters, and once they have
    again.
    """
    built = start(MX, DP2_OVERLAP)
    prepare_step(built, 0)
    built.optimizer.step()
    built.optimizer.wait_for_params()
    found = [held(built)]
    for (
        buffer
    ) in built.ddp.buffers:  # another one would gather, and erase, these gradients
        buffer.grad_data.fill_(1.0)
    for group in built.ddp.bucket_groups:
        group.param_gather_dispatched = False  # as the backward pass does
    built.optimizer.wait_for_params()
    found.append(held(built))
    assert all(bool((buffer.grad_data == 1.0).all()) for buffer in built.ddp.buffers)
    return found


@pytest.mark.skipif(VERSION < (0, 19), reason="mxfp8 parameters need core 0.19")
def test_parameters_can_be_waited_for_where_they_travel_through_gradients() -> None:
    ranks = run(_waited, 2)
    for when in range(2):
        found = whole([rank[when] for rank in ranks])
        assert differences(truth(replace(MX, steps=1)), found) == []


def _kinds(case: Case) -> dict[str, int]:
    from megatron.core.fp8_utils import is_float8tensor

    params = build(case, ONE).params.values()
    return {"fp8": sum(map(is_float8tensor, params)), "other": len(params)}


def test_the_linears_weights_are_in_fp8() -> None:
    (kinds,) = run(_kinds, 1, FP8)
    assert kinds["fp8"] == 4 * FP8.layers < kinds["other"]


def _resumed(case: Case, topology: Topology, format: str, folder: Path) -> list[str]:
    built = stepped(replace(case, steps=2), topology)
    save(built, folder, format)
    saved = held(built)
    take_step(built, 2)
    again = start(case, topology)
    spoil(again)
    load(again, folder, format)
    wrong = _unlike(saved, held(again), "loaded: ")
    take_step(again, 2)
    return wrong + _unlike(held(built), held(again), "stepped: ")


def _unlike(one: dict[str, Any], other: dict[str, Any], when: str) -> list[str]:
    """Of main parameters and momentum; weights may have been scaled otherwise."""
    return unequal({**one, "params": {}}, {**other, "params": {}}, when, log=False)


@pytest.mark.parametrize("case", [FP8, *OTHERS])
@in_each_format
def test_a_run_resumes_from_a_checkpoint(
    case: Case, format: str, tmp_path: Path
) -> None:
    for wrong in on_ranks(_resumed, case, DP2, format, tmp_path):
        assert wrong == []


@pytest.mark.parametrize(
    "case, at_save, at_load",
    [
        (FP8, TP2_DP2_SP, PP2_DP3_OVERLAP),
        pytest.param(FP8, DP3, Topology(2, 2, **SP), id="tp", marks=pytest.mark.slow),
        (MOE, DP4_EP2, TP2_DP2_EP2),
    ],
)
def test_another_topology(
    case: Case, at_save: Topology, at_load: Topology, tmp_path: Path
) -> None:
    """Main parameters and momenta go on in bits; weights have a scale that each TP rank
    chooses.
    """
    check_resharded(case, at_save, case, at_load, tmp_path)


def _switched(case: Case, format: str, folder: Path, change: float) -> str:
    """AdamW's checkpoint into Muon; with main parameters that are not the model's, if
    changed.
    """
    adam = stepped(replace(case, optimizer="adam", steps=2), DP2)
    if change:
        for group in adam.optimizer.chained_optimizers[
            0
        ].shard_fp32_from_float16_groups:
            for shard in group:
                shard.mul_(change)
    save(adam, folder, format)
    muon = start(case, DP2)
    spoil(muon)
    try:
        with reading_the_other(muon):
            load(muon, folder, format)
    except (ValueError, RuntimeError) as error:
        return str(error)
    take_step(muon, 2)
    return "no error"


@pytest.mark.parametrize("change", [0.0, 2.0], ids=["as-saved", "others"])
@pytest.mark.parametrize("case", [FP8, *OTHERS])
@pytest.mark.parametrize("format", formats()[:1])
def test_muon_resumes_from_adamw(
    case: Case, format: str, change: float, tmp_path: Path
) -> None:
    for said in run(_switched, 2, case, format, tmp_path, change):
        assert ("no error" in said) is not bool(change), said
        assert "does not round to the model's weight" in said or not change


def _refused(recipe: str) -> str:
    built = build(FP8, ONE)
    built.case = replace(FP8, fp8=recipe)  # a custom one needs a function to be built
    return error_of_optimizer(built)


def test_another_recipe_is_refused() -> None:
    (said,) = run(_refused, 1, "custom")
    assert "does not support fp8_param_gather with fp8_recipe=custom yet" in said
    assert (
        "give one of delayed, tensorwise, blockwise, mxfp8, or keep parameters in bf16"
        in said
    )
