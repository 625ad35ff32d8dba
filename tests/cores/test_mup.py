"""muP: Megatron's rates by width for AdamW's parameters, Muon's scale for its
matrices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from megatron.core import optimizer as mcore_optimizer

from megatron_muon import MuonConfig
from megatron_muon.mcore.host.shards import owned_shards
from support.installed import VERSION, installed
from support.models.gpt import (
    Built,
    Case,
    Topology,
    build,
    distributed_optimizers,
    held,
    optimizer_config,
    take_step,
    train,
)
from support.ranks import error_of, run
from support.runs.topologies import DP2, DP2_EP2, ONE, TP2, TP2_DP2
from support.runs.whole import differences, whole

pytestmark = pytest.mark.skipif(
    VERSION < (0, 17), reason="Megatron has it since core 0.17"
)
CASE = Case(layers=1).with_muon(scale_mode="unit_rms_norm")
MOE = replace(CASE, moe=True)
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"


def _build(case: Case, topology: Topology) -> Built:
    """With the marks that a model of ``--use-mup`` has: Megatron sets them as it makes
    the model.
    """
    from megatron.core.utils import unwrap_model  # not in cores without muP

    built = build(case, topology)
    for chunk in built.chunks:
        chunk.config.use_mup = True
        unwrap_model(chunk).setup_embeddings_and_output_layer()
    return built


def _optimizer(built: Built, width: float, of: str = "muon") -> Any:
    """As Megatron-LM's ``setup_model_and_optimizer`` makes it."""
    config = optimizer_config(built)
    overrides = mcore_optimizer.get_standard_config_overrides(config)
    mup = mcore_optimizer.get_mup_config_overrides(config, width, of)
    return mcore_optimizer.get_megatron_optimizer(
        config, built.chunks, config_overrides={**overrides, **mup}
    )


def _rates(built: Built, groups: list[Mapping[str, Any]]) -> dict[str, float]:
    """The largest rate of each parameter here, of which groups may have a shard."""
    names = built.names
    if built.optimizer is not None:
        for part in distributed_optimizers(built.optimizer):
            names |= {id(s): names[id(param)] for param, s in owned_shards(part)}
    rates = {}
    for group in groups:
        for param in group["params"]:
            rates[names[id(param)]] = group["max_lr"]
    return rates


def _by_mup(
    case: Case, topology: Topology, width: float, of: str = "muon"
) -> dict[str, Any]:
    """The rates that Megatron's own functions give with ``optimizer='muon'``, and what
    two steps with the plugin hold.
    """
    built = _build(case, topology)
    config = optimizer_config(built)
    overrides = mcore_optimizer.get_standard_config_overrides(config)
    overrides |= mcore_optimizer.get_mup_config_overrides(config, width, "muon")
    groups = mcore_optimizer._get_param_groups(built.chunks, config, overrides)
    megatrons = _rates(built, groups)
    with installed(case.settings):
        built.optimizer = _optimizer(built, width, of)
    here = _rates(built, built.optimizer.param_groups)
    for step in range(2):
        take_step(built, step)
    return {**held(built), "here": here, "megatrons": megatrons}


@pytest.mark.parametrize(
    "case, topology, width",
    [
        (CASE, ONE, 2.0),
        (CASE, TP2_DP2, 4.0),
        (MOE, DP2_EP2, 8.0),
    ],
    ids=["one", "tp and dp", "experts"],
)
def test_rates_are_megatrons_and_each_factor_is_applied_once(
    case: Case, topology: Topology, width: float
) -> None:
    """So Muon's matrices move as without muP, and the untied output layer, which
    Megatron counts as an embedding.
    """
    by_mup = run(_by_mup, topology.world_size, case, topology, width)
    for rank in by_mup:
        megatrons = rank["megatrons"]
        assert rank["here"] == {name: megatrons[name] for name in rank["here"]}
        assert len(set(megatrons.values())) == 1
    expected = run(train, topology.world_size, replace(case, steps=2), topology)
    assert differences(whole(expected), whole(by_mup)) == []


def test_rates_that_were_made_for_adam_leave_muons_matrices() -> None:
    """They differ in AdamW's epsilon, which is not in these groups' rates."""
    of_adam, of_muon = (
        run(_by_mup, 1, CASE, ONE, 4.0, of)[0]["here"] for of in ("adam", "muon")
    )
    assert of_adam == of_muon


def test_a_matrix_that_is_adamws_here_has_its_factor() -> None:
    """Megatron's own Muon would update it, so that its muP leaves it out."""
    case = CASE.with_muon(muon_exclude=(FC2,))
    by_mup = run(_by_mup, 2, case, DP2, 4.0)
    by_hand = replace(case.with_muon(lr_mults=((FC2, 0.25),)), steps=2)
    expected = run(train, 2, by_hand, DP2)
    assert differences(whole(expected), whole(by_mup)) == []


def _refused(settings: dict[str, Any]) -> str:
    built = _build(CASE, TP2)
    with installed(MuonConfig(**settings)):
        return error_of(lambda: _optimizer(built, 2.0))


@pytest.mark.parametrize(
    "settings, said",
    [
        ({}, r"use_mup with scale_mode \(--muon-scale-mode\) spectral: "),
        ({"scale_mode": "update_norm"}, r"update_norm: .* give unit_rms_norm"),
        (
            {
                "scale_mode": "unit_rms_norm",
                "by_pattern": {FC2: {"scale_mode": "spectral", "rms": 0.2}},
            },
            r"use_mup with scale_mode \(--muon-scale-mode\) spectral: ",
        ),
    ],
    ids=["spectral", "update_norm", "by pattern"],
)
def test_what_contradicts_it_is_refused_on_all_ranks(
    settings: dict[str, Any], said: str
) -> None:
    for text in run(_refused, 2, settings):
        assert text.startswith("ValueError: ") and re.search(said, text), text


@pytest.mark.parametrize(
    "settings", [{"rule": "hyperball"}, {"scale_mode": "shape_scaling"}], ids=str
)
def test_nothing_is_refused_that_does_not_grow_with_the_width(
    settings: dict[str, Any],
) -> None:
    assert run(_refused, 2, settings) == ["no error"] * 2
