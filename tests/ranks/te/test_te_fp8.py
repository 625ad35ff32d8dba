"""Weights in fp8 (--fp8-param-gather) by delayed scaling: the step is that of one process, in bits.

The weights are Transformer Engine's Float8Tensor; quantizing is the stub's. fp8 products are not in
the stub, so nothing is computed with them: gradients are written, as everywhere here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_muon.mcore.checkpoint.interop.switch import reading_adamw
from support import te_on_cpu
from support.checkpoints.resharding import loaded, saved
from support.checkpoints.saving import formats, load, save, spoil, unequal
from support.covering import FULL
from support.models.gpt import (
    Case,
    Topology,
    build,
    check,
    error_of_optimizer,
    held,
    start,
    take_step,
    trained,
    truth,
)
from support.ranks import run
from support.runs.whole import Whole, differences, whole

pytestmark = pytest.mark.skipif(te_on_cpu.TE is None, reason="no Transformer Engine on the path")

FP8 = Case(steps=4, fp8="delayed")
MOE = replace(FP8, moe=True, grouped="te")
SP = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        pytest.param(FP8, Topology(2, 2, 2, overlap=True, **SP), id="dense"),
        pytest.param(replace(FP8, gated=True), Topology(dp=3), id="gated-dp3"),
        pytest.param(replace(FP8, layers=4), Topology(pp=2, dp=2, chunks=2), id="vpp"),
        pytest.param(replace(MOE, gated=True), Topology(tp=2, dp=2, ep=2, **SP), id="grouped"),
        pytest.param(replace(FP8, mla="duplicated"), Topology(2, 1, 2, **SP), id="mla"),
    ],
)
def test_a_topology_equals_one_process(case: Case, topology: Topology) -> None:
    check(case, topology)


def test_a_gather_within_the_step_waits_for_what_is_scaled() -> None:
    early = replace(FP8, muon=(("round_bytes", 1), ("early_param_gather", "on")))
    topology = Topology(2, 2, 2, overlap=True, **SP)
    assert differences(truth(replace(early, muon=early.muon[:1])), trained(early, topology)) == []


def _ready(case: Case, topology: Topology) -> tuple[int, int]:
    """fp8 weights that a step gathers, and how many of them it makes ready for use."""
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.fp8_utils import is_float8tensor

    built, ready = start(case, topology), list[Any]()
    with mock.patch.object(buffers, "post_all_gather_processing", ready.extend):
        take_step(built, 0)
    done = set(map(id, ready))
    gathers = built.optimizer.chained_optimizers[0].early_gathers.gathers
    groups = [gather.group for gather in gathers if gather.after is not None]
    params = {id(p) for g in groups for b in g.buckets for p in b.params if is_float8tensor(p)}
    return len(params), len(params & done)


def test_outside_of_megatron_lms_loop_a_step_ends_with_weights_ready_for_use() -> None:
    case = replace(FP8, muon=(("early_param_gather", "on"),))
    for gathered, ready in run(_ready, 2, case, Topology(dp=2, overlap=True)):
        assert 0 < gathered == ready


def _kinds(case: Case) -> dict[str, int]:
    from megatron.core.fp8_utils import is_float8tensor

    params = build(case, Topology()).params.values()
    return {"fp8": sum(map(is_float8tensor, params)), "other": len(params)}


def test_the_linears_weights_are_in_fp8() -> None:
    (kinds,) = run(_kinds, 1, FP8)
    assert kinds["fp8"] == 4 * FP8.layers < kinds["other"]


def _resumed(case: Case, topology: Topology, format: str, folder: str) -> list[str]:
    built = start(case, topology)
    for step in range(2):
        take_step(built, step)
    save(built, folder, format)
    saved = held(built)
    take_step(built, 2)
    again = start(case, topology)
    spoil(again)
    load(again, folder, format)
    wrong = unequal({**saved, "params": {}}, {**held(again), "params": {}}, "loaded: ", log=False)
    take_step(again, 2)
    return wrong + _unlike(held(built), held(again))


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Of main parameters and momentum; weights may have been scaled otherwise."""
    return unequal({**one, "params": {}}, {**other, "params": {}}, "stepped: ", log=False)


@pytest.mark.parametrize("format", formats())
def test_a_checkpoint_goes_on(format: str, tmp_path: Path) -> None:
    for wrong in run(_resumed, 2, FP8, Topology(dp=2), format, str(tmp_path)):
        assert wrong == []


@pytest.mark.parametrize(
    ("case", "at_save", "at_load"),
    [
        pytest.param(
            FP8, Topology(tp=2, dp=2, **SP), Topology(pp=2, dp=3, overlap=True), id="dense"
        ),
        pytest.param(FP8, Topology(dp=3), Topology(2, 2, **SP), id="tp", marks=pytest.mark.slow),
        pytest.param(MOE, Topology(dp=4, ep=2), Topology(tp=2, dp=2, ep=2, **SP), id="grouped"),
    ],
)
def test_another_topology(case: Case, at_save: Topology, at_load: Topology, tmp_path: Path) -> None:
    """Main parameters and momenta go on in bits; weights have a scale that each TP rank chooses."""
    (format,) = (format for format in formats() if format in FULL)
    before = run(saved, at_save.world_size, case, at_save, format, str(tmp_path))
    after = run(loaded, at_load.world_size, case, at_load, format, str(tmp_path))
    for when in range(2):
        one, other = (_of_optimizer([held[when] for held in runs]) for runs in (before, after))
        assert differences(one, other) == []
    assert differences(one, _of_optimizer([held[0] for held in after]))  # the steps did something


def _of_optimizer(ranks: list[dict[str, Any]]) -> Whole:
    return {kind: tensors for kind, tensors in whole(ranks).items() if kind != "params"}


def _switched(format: str, folder: str, change: float) -> str:
    """AdamW's checkpoint into Muon; with main parameters that are not the model's, if changed."""
    adam = start(replace(FP8, optimizer="adam"), Topology(dp=2))
    for step in range(2):
        take_step(adam, step)
    if change:
        for group in adam.optimizer.chained_optimizers[0].shard_fp32_from_float16_groups:
            for shard in group:
                shard.mul_(change)
    save(adam, folder, format)
    muon = start(FP8, Topology(dp=2))
    spoil(muon)
    try:
        with reading_adamw(muon.optimizer, "momentum"):
            load(muon, folder, format)
    except (ValueError, RuntimeError) as error:
        return str(error)
    take_step(muon, 2)
    return "no error"


@pytest.mark.parametrize("change", [0.0, 2.0], ids=["as-saved", "others"])
@pytest.mark.parametrize("format", formats()[:1])
def test_muon_goes_on_from_adamw(format: str, change: float, tmp_path: Path) -> None:
    for said in run(_switched, 2, format, str(tmp_path), change):
        assert ("no error" in said) is not bool(change), said
        assert "does not round to the model's weight" in said or not change


def _refused(recipe: str) -> str:
    return error_of_optimizer(build(replace(FP8, fp8=recipe), Topology()))


def test_another_recipe_is_refused() -> None:
    (said,) = run(_refused, 1, "tensorwise")
    assert "does not support fp8_param_gather with fp8_recipe=tensorwise yet" in said
    assert "give fp8_recipe='delayed' or keep parameters in bf16" in said
