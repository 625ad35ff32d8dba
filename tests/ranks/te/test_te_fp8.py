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

from megatron_muon.mcore.checkpoint.interop.switch import reading_adamw
from ranks.te.test_precision_aware import _of_optimizer as of_optimizer
from support.checkpoints.resharding import loaded, saved
from support.checkpoints.saving import (
    FORMATS,
    RESHARDABLE,
    in_every_format,
    load,
    save,
    spoil,
    unequal,
)
from support.installed import VERSION, needs_te
from support.models.gpt import (
    Case,
    Topology,
    build,
    check,
    error_of_optimizer,
    held,
    prepare_step,
    start,
    stepped,
    take_step,
    trained,
    truth,
)
from support.ranks import run, run_alone, run_on
from support.runs.whole import differences, whole

pytestmark = needs_te

FP8 = Case(fp8="delayed")
MOE = replace(FP8, moe=True, grouped="te")
SP = {"sequence_parallel": True}
# Several blocks of 128 rows in fc1, of which the edges of shards cut some.
OTHERS = [replace(FP8, fp8=recipe, ffn=288) for recipe in ("tensorwise", "blockwise")]
# A bucket's weights are gathered in bf16 through the memory of its gradients; slices of
# 32.
MX = replace(FP8, fp8="mxfp8", ffn=256)
by_other_recipes = pytest.mark.parametrize(
    "case", OTHERS, ids=["tensorwise", "blockwise"]
)


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        pytest.param(FP8, Topology(2, 2, 2, overlap=True, **SP), id="dense"),
        pytest.param(replace(FP8, gated=True), Topology(dp=3), id="gated-dp3"),
        pytest.param(replace(FP8, layers=4), Topology(pp=2, dp=2, chunks=2), id="vpp"),
        pytest.param(
            replace(MOE, gated=True), Topology(tp=2, dp=2, ep=2, **SP), id="grouped"
        ),
        pytest.param(replace(FP8, mla="duplicated"), Topology(2, 1, 2, **SP), id="mla"),
    ],
)
def test_a_topology_equals_one_process(case: Case, topology: Topology) -> None:
    check(case, topology)


@by_other_recipes
def test_by_other_recipes_data_parallel_ranks_have_the_weights_of_one(
    case: Case,
) -> None:
    check(case, Topology(dp=3, overlap=True))


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


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param(Topology(dp=3), id="dp3"),
        pytest.param(Topology(pp=2, dp=2, overlap=True), id="overlap"),
    ],
)
def test_weights_that_travel_through_the_memory_of_gradients(
    topology: Topology,
) -> None:
    if VERSION < (0, 19):
        said = run_alone(_refused, "mxfp8")
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
    built = start(MX, Topology(dp=2, overlap=True))
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

    params = build(case, Topology()).params.values()
    return {"fp8": sum(map(is_float8tensor, params)), "other": len(params)}


def test_the_linears_weights_are_in_fp8() -> None:
    kinds = run_alone(_kinds, FP8)
    assert kinds["fp8"] == 4 * FP8.layers < kinds["other"]


def _resumed(case: Case, topology: Topology, format: str, folder: str) -> list[str]:
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
    return unequal({**one, "params": {}}, {**other, "params": {}}, when)


@pytest.mark.parametrize("case", [FP8, *OTHERS], ids=lambda case: case.fp8)
@in_every_format
def test_a_run_resumes_from_a_checkpoint(
    case: Case, format: str, tmp_path: Path
) -> None:
    for wrong in run_on(_resumed, case, Topology(dp=2), format, str(tmp_path)):
        assert wrong == []


@pytest.mark.parametrize(
    ("case", "at_save", "at_load"),
    [
        pytest.param(
            FP8,
            Topology(tp=2, dp=2, **SP),
            Topology(pp=2, dp=3, overlap=True),
            id="dense",
        ),
        pytest.param(
            FP8, Topology(dp=3), Topology(2, 2, **SP), id="tp", marks=pytest.mark.slow
        ),
        pytest.param(
            MOE, Topology(dp=4, ep=2), Topology(tp=2, dp=2, ep=2, **SP), id="grouped"
        ),
    ],
)
def test_another_topology(
    case: Case, at_save: Topology, at_load: Topology, tmp_path: Path
) -> None:
    """Main parameters and momenta go on in bits; weights have a scale that each TP rank
    chooses.
    """
    format = RESHARDABLE
    before = run_on(saved, case, at_save, format, str(tmp_path))
    after = run_on(loaded, case, at_load, format, str(tmp_path))
    for when in range(2):
        one, other = (
            of_optimizer(whole([held[when] for held in runs]))
            for runs in (before, after)
        )
        assert differences(one, other) == []
    # the steps did something
    assert differences(one, of_optimizer(whole([held[0] for held in after])))


def _switched(case: Case, format: str, folder: str, change: float) -> str:
    """AdamW's checkpoint into Muon; with main parameters that are not the model's, if
    changed.
    """
    adam = stepped(replace(case, optimizer="adam", steps=2), Topology(dp=2))
    if change:
        for group in adam.optimizer.chained_optimizers[
            0
        ].shard_fp32_from_float16_groups:
            for shard in group:
                shard.mul_(change)
    save(adam, folder, format)
    muon = start(case, Topology(dp=2))
    spoil(muon)
    try:
        with reading_adamw(muon.optimizer, "momentum"):
            load(muon, folder, format)
    except (ValueError, RuntimeError) as error:
        return str(error)
    take_step(muon, 2)
    return "no error"


@pytest.mark.parametrize("change", [0.0, 2.0], ids=["as-saved", "others"])
@pytest.mark.parametrize("case", [FP8, *OTHERS], ids=lambda case: case.fp8)
@pytest.mark.parametrize("format", FORMATS[:1])
def test_muon_resumes_from_adamw(
    case: Case, format: str, change: float, tmp_path: Path
) -> None:
    for said in run(_switched, 2, case, format, str(tmp_path), change):
        assert ("no error" in said) is not bool(change), said
        assert "does not round to the model's weight" in said or not change


def _refused(recipe: str) -> str:
    built = build(FP8, Topology())
    built.case = replace(FP8, fp8=recipe)  # a custom one needs a function to be built
    return error_of_optimizer(built)


def test_another_recipe_is_refused() -> None:
    said = run_alone(_refused, "custom")
    assert "does not support fp8_param_gather with fp8_recipe=custom yet" in said
    assert (
        "give one of delayed, tensorwise, blockwise, mxfp8, or keep parameters in bf16"
        in said
    )
