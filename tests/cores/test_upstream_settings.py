"""Settings of Megatron's own Muon that arrive from Python mean here what they mean
there.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer import OptimizerConfig

import megatron_muon
from megatron_muon.megatron_lm import switching
from support.installed import VERSION, installed
from support.megatron_lm.flag_parsers import config_of
from support.models import megatrons_muon
from support.models.gpt import (
    Case,
    Topology,
    build,
    held,
    optimizer_config,
    printed_by,
    take_step,
    whole_weight,
)
from support.ranks import run
from support.runs.whole import Whole, differences, whole

CASE = Case(layers=2, steps=2)
ALONE = Topology()
FIELDS = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}
NESTEROV = next(
    (name for name in FIELDS if name.startswith("muon_") and "nesterov" in name), ""
)
pytestmark = pytest.mark.skipif(
    VERSION < (0, 16), reason="no Muon of Megatron's own before 0.16"
)

# What Megatron's own Muon does by default, as this plugin's settings.
UPSTREAM = {
    "momentum": 0.95,
    "nesterov": False,
    "matched_adamw_rms": 1.0,
    "ns_coefficients": "quintic",
    "ns_dtype": "bf16",
}


def _started(
    fields: dict[str, Any],
    own: dict[str, Any] | None = None,
    topology: Topology = ALONE,
    routed: tuple[tuple[str, str], ...] = (),
    by: str = "get_megatron_optimizer",
) -> tuple[Any, str]:
    """The model with an optimizer of these fields, and what it printed. ``own`` is
    given to ``install``; ``routed`` are (pattern of names, optimizer) of
    ``config_overrides``.
    """
    from megatron.core import optimizer as core
    from megatron.core.optimizer.optimizer_config import ParamKey

    built = build(CASE, topology)
    config = optimizer_config(built)
    for name, value in fields.items():
        setattr(config, name, value)
    arguments: dict[str, Any] = {}
    if routed:
        standard = core.get_standard_config_overrides(config)
        named = {ParamKey(name=name): {"optimizer": whose} for name, whose in routed}
        arguments["config_overrides"] = {**standard, **named}
    with installed(None if own is None else megatron_muon.MuonConfig(**own)):
        make = core.get_megatron_optimizer
        # what Megatron-Bridge and ms-swift call for any name with muon in it
        if by == "bridge":
            from megatron.core.optimizer.muon import get_megatron_muon_optimizer as make

            arguments["layer_wise_distributed_optimizer"] = "dist" in config.optimizer
        built.optimizer, printed = printed_by(
            lambda: make(config, built.chunks, **arguments)
        )
    assert config.optimizer == fields.get("optimizer", "muon")
    return built, printed


def _settings(*cases: Any) -> list[Any]:
    """(settings, lines) or the error of each case: the arguments of ``_started``."""
    results: list[Any] = []
    for case in cases:
        try:
            built, printed = _started(**case)
        except (ValueError, NotImplementedError) as error:
            results.append(str(error))
        else:
            (part,) = built.optimizer.chained_optimizers
            results.append((part.muon.numerics.config, printed))
    return results


def _of(*cases: dict[str, Any]) -> list[Any]:
    return run(_settings, 1, *cases, timeout=240)[0]


def _trained(case: dict[str, Any]) -> dict[str, Any]:
    built, _ = _started(**case)
    for step in range(CASE.steps):
        take_step(built, step)
    return held(built)


def _steps(case: dict[str, Any]) -> Whole:
    return whole(
        run(_trained, case.get("topology", ALONE).world_size, case, timeout=240)
    )


DIST: dict[str, Any] = {"optimizer": "dist_muon"}


def test_with_dist_muon_every_field_counts_the_defaults_too() -> None:
    default, changed, own = _of(
        {"fields": DIST},
        {
            "fields": DIST
            | {NESTEROV: True, "muon_momentum": 0.9, "muon_split_qkv": False}
        },
        # a setting that is the plugin's alone
        {"fields": DIST, "own": {"homes": "local", "rule": "hyperball"}},
    )
    assert default[0] == megatron_muon.MuonConfig(**UPSTREAM)
    assert (
        "OptimizerConfig, all of them (dist_muon): scale 1 × spectral, momentum 0.95,"
        " Nesterov off, QKV split" in default[1]
    )
    assert "Newton-Schulz: quintic, 5 steps, bf16" in default[1]
    assert changed[0] == replace(
        default[0], nesterov=True, momentum=0.9, split_qkv=False
    )
    assert "momentum 0.9, Nesterov on" in changed[1]
    assert (own[0].homes, own[0].rule) == ("local", "hyperball")


@pytest.mark.skipif(
    megatrons_muon.lacking() is not None, reason=str(megatrons_muon.lacking())
)
def test_dist_muon_takes_the_steps_of_megatrons_own_muon(tmp_path: Path) -> None:
    """Up to bf16 in Newton-Schulz, 0.8 % of an update; Nesterov's form, another set of
    coefficients or a scale of 1.1 would be off by 10 % or more.
    """
    before = replace(CASE, steps=CASE.steps - 1)  # it takes one more
    (theirs,) = run(
        megatrons_muon.trained, 1, before, ALONE, False, str(tmp_path), timeout=240
    )
    ours = _steps({"fields": DIST | {"muon_momentum": megatrons_muon.MU}})["main"]
    for name, main in whole([theirs["after"]])["main"].items():
        moved = main - whole_weight(CASE, name, main.shape)
        off = float((ours[name] - main).norm() / moved.norm())
        assert off < 0.02, name


def test_a_checkpoint_of_megatrons_own_muon_prints_the_flags_of_its_settings() -> None:
    optimizer = SimpleNamespace(config=OptimizerConfig())
    said = switching._settings_of_megatrons(optimizer)
    flags = said.split("if they were Megatron's defaults, are ")[1].split()
    assert config_of("0.19", *flags) == megatron_muon.MuonConfig(
        **{**UPSTREAM, "ns_dtype": None}
    )


@pytest.mark.parametrize("by", ["get_megatron_optimizer", "bridge"])
def test_dist_muon_takes_the_steps_of_muon_with_the_same_settings(by: str) -> None:
    theirs, ours = {"fields": DIST, "by": by}, {"fields": {}, "own": UPSTREAM}
    assert differences(_steps(theirs), _steps(ours)) == []


def test_with_muon_only_fields_unlike_that_cores_default_count() -> None:
    plain, momentum, scaled, highest = _of(
        {"fields": {}},
        {"fields": {"muon_momentum": 0.9}},
        {"fields": {"muon_scale_mode": "unit_rms_norm"}},
        {
            "fields": {
                "muon_fp32_matmul_prec": "highest",
                "muon_extra_scale_factor": 0.3,
            }
        },
    )
    assert plain[0].matched_adamw_rms == 0.2 and plain[0].nesterov
    assert "muon_* fields" not in plain[1]
    assert momentum[0] == replace(plain[0], momentum=0.9)
    assert "OptimizerConfig: muon_momentum: scale 0.2 × spectral" in momentum[1]
    assert scaled[0] == replace(
        plain[0], scale_mode="unit_rms_norm", matched_adamw_rms=1.0
    )
    assert highest[0] == replace(plain[0], ns_dtype="fp32", matched_adamw_rms=0.3)


def test_the_start_says_where_the_steps_are_not_the_sets_own() -> None:
    own, other = _of(
        {"fields": {}}, {"fields": {}, "own": {"ns_coefficients": "polar_express"}}
    )
    assert "Newton-Schulz: simple, 5 steps, bf16" in own[1]
    assert "Newton-Schulz: polar_express, 5 steps (made for 8), bf16" in other[1]


@pytest.mark.skipif(
    "muon_coefficient_type" not in FIELDS, reason="core 0.16 has no such field"
)
def test_deepseekv4_has_its_ten_steps_where_five_may_be_the_default() -> None:
    """With dist_muon the five count, since Megatron's own Muon would run them: simple
    alone.
    """
    deepseek = {"muon_coefficient_type": "deepseekv4"}
    of_muon, of_dist, given = _of(
        {"fields": deepseek},
        {"fields": DIST | deepseek},
        {"fields": DIST | deepseek | {"muon_num_ns_steps": 10}},
    )
    assert of_muon[0].ns_steps == given[0].ns_steps == 10
    assert "deepseekv4, 10 steps" in of_muon[1]
    assert (
        "ns_steps (--muon-ns-steps) is 5, with which it is simple alone: give 10"
        in of_dist
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a setting in both places": (
        {"fields": {"muon_momentum": 0.9}, "own": {"matched_adamw_rms": 0.2}},
        "install(MuonConfig(matched_adamw_rms=0.2)) beside "
        "OptimizerConfig.muon_momentum=0.9:",
    ),
    "dist_muon's default in both places": (
        {"fields": DIST, "own": {"momentum": 0.95}},
        "install(MuonConfig(momentum=0.95)) beside "
        "OptimizerConfig.optimizer='dist_muon':",
    ),
    "another optimizer of the rest": (
        {"fields": DIST | {"muon_scalar_optimizer": "lion"}},
        "--muon-scalar-optimizer lion has no meaning in megatron_muon",
    ),
    "a mode that does not exist": (
        {"fields": {"muon_tp_mode": "blocks"}},
        "muon_tp_mode must be one of blockwise, duplicated, distributed, got 'blocks'",
    ),
    "cleared": (
        {"fields": DIST | {"use_distributed_optimizer": False}},
        "OptimizerConfig.use_distributed_optimizer is False: set it in OptimizerConfig",
    ),
    "Muon of a vector by an override": (
        {"fields": {}, "routed": (("*.linear_fc1.bias", "muon"),)},
        "Muon updates matrices",
    ),
}


def test_what_cannot_be_is_an_error_that_names_the_field() -> None:
    cases = {
        name: case
        for name, case in REFUSED.items()
        if FIELDS.keys() >= case[0]["fields"].keys()  # core 0.16 has fewer
    }
    for text, (name, (_, said)) in zip(
        _of(*(case for case, _ in cases.values())), cases.items(), strict=True
    ):
        assert isinstance(text, str), name
        assert said in text, name


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(dp=2)], ids=str)
def test_only_blockwise_over_tp_ranks_warns_of_other_mathematics(
    topology: Topology,
) -> None:
    modes = ("blockwise", "distributed", "duplicated")
    cases = [
        {"fields": DIST | {"muon_tp_mode": mode}, "topology": topology}
        for mode in modes
    ]
    first, other = run(_settings, 2, *cases, timeout=240)
    for mode, (_, printed), (_, elsewhere) in zip(modes, first, other, strict=True):
        warned = "warning: muon_tp_mode='blockwise', in Megatron's own" in printed
        assert warned == (mode == "blockwise" and topology.tp == 2)
        assert "warning" not in elsewhere  # rank 0 says it


def test_blockwise_of_two_tp_ranks_takes_the_steps_of_one_process() -> None:
    fields = {"fields": DIST | {"muon_tp_mode": "blockwise"}}
    assert (
        differences(_steps(fields), _steps({**fields, "topology": Topology(tp=2)}))
        == []
    )


@pytest.mark.parametrize("topology", [ALONE, Topology(pp=2)], ids=str)
def test_an_override_routes_weights_to_adamw_or_to_muon(topology: Topology) -> None:
    """The same steps as with the patterns of MuonConfig, on every stage."""
    routed = (("*.linear_fc1.weight", "adam"), ("*.word_embeddings.weight", "muon"))
    own = {
        "muon_exclude": ("*.linear_fc1.weight",),
        "muon_include": ("*.word_embeddings.weight",),
    }
    case = {"fields": {}, "topology": topology}
    by_override = _steps({**case, "routed": routed})
    by_pattern = _steps({**case, "own": own})
    assert differences(by_override, by_pattern) == []
    adams = {name for name in by_override["exp_avg_sq"] if name.endswith(".weight")}
    assert any("linear_fc1" in name for name in adams)
    assert not any("word_embeddings" in name for name in adams)
