"""The plugin installed and not asked for leaves Megatron as it is; installing is
idempotent.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from support.installed import VERSION, installed
from support.models.gpt import (
    Case,
    Topology,
    build,
    held,
    make_optimizer,
    start,
    take_step,
    train,
)
from support.ranks import error_of, run
from support.runs.topologies import ONE
from support.runs.whole import differences, whole

ALONE, NAMES = ONE, ("muon", "adam")
ADAM = Case(optimizer="adam", layers=2, steps=4, lr=1e-3, clip=1.0)


def _train_adam_with_the_plugin(case: Case, topology: Topology) -> dict[str, Any]:
    with installed():
        return train(case, topology)


@pytest.mark.parametrize("topology", [ONE, Topology.of("tp2 pp2 dp2 overlap")], ids=str)
def test_adam_is_bitwise_as_without_the_plugin(topology: Topology) -> None:
    without = whole(run(train, topology.world_size, ADAM, topology))
    with_plugin = whole(
        run(_train_adam_with_the_plugin, topology.world_size, ADAM, topology)
    )
    assert differences(without, with_plugin) == []


def _momentum_and_error() -> tuple[float, str]:
    import megatron_muon

    megatron_muon.install(megatron_muon.MuonConfig(momentum=0.5))
    megatron_muon.install()
    muon, adam = (
        make_optimizer(build(replace(ADAM, optimizer=x), ALONE)) for x in NAMES
    )
    error = error_of(lambda: megatron_muon.meter(adam))
    return muon.chained_optimizers[0].muon.config.momentum, error


def test_a_later_install_keeps_the_settings_and_adamw_has_no_meter() -> None:
    ((momentum, error),) = run(_momentum_and_error, 1)
    assert momentum == 0.5 and "has no Muon part" in error


def _taken_before(how: str) -> str:
    from types import ModuleType

    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    import megatron_muon

    script = ModuleType("script")
    script.get_megatron_optimizer = get_megatron_optimizer  # type: ignore[attr-defined]
    sys.modules["script"] = script
    built = build(replace(ADAM, optimizer="muon"), ONE)
    config = OptimizerConfig(
        optimizer="muon", lr=0.1, bf16=True, use_distributed_optimizer=True
    )
    megatron_muon.install()  # after the name was taken
    try:
        if how == "by import":
            optimizer = script.get_megatron_optimizer(config, [built.ddp])
        else:
            optimizer = get_megatron_optimizer(config, [built.ddp])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        megatron_muon.uninstall()
        del sys.modules["script"]
    assert script.get_megatron_optimizer is get_megatron_optimizer, "not given back"
    return type(optimizer.chained_optimizers[0]).__name__


def test_a_module_that_imported_the_function_before_gets_the_plugins() -> None:
    assert run(_taken_before, 1, "by import") == ["MuonDistributedOptimizer"]


def test_a_function_kept_elsewhere_before_is_an_error_and_not_another_muon() -> None:
    (text,) = run(_taken_before, 1, "in a variable")
    assert text.startswith(
        "SeamError: optimizer='muon' was asked of a get_megatron_optimizer that"
    )


def _asked_of_megatrons_own_function(layer_wise: bool) -> str:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer import muon as module

    built = build(replace(ADAM, optimizer="muon"), ONE)
    config = OptimizerConfig(
        optimizer="muon", lr=0.1, bf16=True, use_distributed_optimizer=True
    )
    try:
        with installed():
            optimizer = module.get_megatron_muon_optimizer(
                config, [built.ddp], layer_wise_distributed_optimizer=layer_wise
            )
    except ValueError as error:
        return str(error)
    return type(optimizer.chained_optimizers[0]).__name__


@pytest.mark.skipif(
    VERSION not in ((0, 16), (0, 17)),
    reason="only cores 0.16 and 0.17 have a function for muon",
)
def test_the_name_muon_is_the_plugins_also_where_megatron_has_a_function_for_it() -> (
    None
):
    assert run(_asked_of_megatrons_own_function, 1, False) == [
        "MuonDistributedOptimizer"
    ]
    (text,) = run(_asked_of_megatrons_own_function, 1, True)
    assert "layer_wise_distributed_optimizer=True asks for Megatron's own Muon" in text


def _decayed(all_params: bool, optimizer: str) -> dict[str, float]:
    """With lr · decay = 1 a decayed parameter becomes minus its update: how much is
    left of it.
    """
    import torch

    settings = (("weight_decay_all_params", all_params),)
    case = replace(ADAM, optimizer=optimizer, steps=1, muon=settings)
    built = start(case, ONE, plugin=True)
    shards = {n: s[2]["main"].copy() for n, s in held(built)["shards"].items()}
    for inner in built.optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups:
            group["max_lr"] = 1e-6
    built = replace(built, case=replace(case, weight_decay=1e6))
    take_step(built, 0)
    after = {n: s[2]["main"] for n, s in held(built)["shards"].items()}
    left = {}
    for name, before in shards.items():
        old = torch.from_numpy(before)
        left[name] = float(torch.from_numpy(after[name]).dot(old) / old.dot(old))
    return left


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
@pytest.mark.parametrize("all_params", [False, True], ids=["", "all"])
def test_weight_decay_all_params_decays_gammas_and_biases_too(
    all_params: bool, optimizer: str
) -> None:
    (left,) = run(_decayed, 1, all_params, optimizer)
    vectors = {n for n in left if "layernorm" in n or n.endswith(".bias")}
    assert vectors and vectors != left.keys()
    for name, share in left.items():
        kept = name in vectors and not all_params
        assert (abs(share - 1) < 0.01) if kept else (abs(share) < 0.01), (name, share)
