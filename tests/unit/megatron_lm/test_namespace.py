"""What the arguments say after the flags are read, for the parsers of
``flag_parsers``.
"""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from megatron_muon.mcore.wiring.validate import raise_all
from megatron_muon.megatron_lm.flags.namespace import remove_flags, write_all
from megatron_muon.megatron_lm.flags.parser import add_flags, given_on
from megatron_muon.megatron_lm.install import asks_for_muon, faults_of
from megatron_muon.settings.flags import MUONS, muon_config
from megatron_muon.settings.run_flags import FLAGS, OF_ANY
from support.megatron_lm.flag_parsers import (
    EVERY,
    MEANINGS,
    WITH_MUON,
    parsed,
    parser_of,
)


def test_all_refused_flags_are_in_one_error() -> None:
    args = argparse.Namespace(
        optimizer="muon",
        use_distributed_optimizer=False,
        optimizer_cpu_offload=1,
        optimizer_cuda_graph=1,
    )
    each = (
        "(?s)--use-distributed-opt.*--optimizer-cuda-graph yet: leave it "
        "off.*--optimizer-cpu-offload without"
    )
    with pytest.raises(ValueError, match=each):
        raise_all(faults_of(args))


# --- a run that is not this package's Muon --------------------------------------------


@EVERY
def test_without_muon_the_arguments_are_as_without_the_plugin(version: str) -> None:
    args = parsed(version)
    remove_flags(args)
    assert vars(args) == vars(parser_of(version).parse_args([]))
    remove_flags(args)  # Megatron may validate a namespace twice
    assert vars(args) == vars(parser_of(version).parse_args([]))


@WITH_MUON
def test_a_flag_of_megatrons_is_megatrons_with_another_optimizer(version: str) -> None:
    given = "--optimizer adam --muon-momentum 0.5 --muon-no-split-qkv".split()
    args = parsed(version, *given)
    remove_flags(args)
    assert vars(args) == vars(parser_of(version).parse_args(given))


@EVERY
@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.option)
def test_a_flag_of_the_plugins_needs_muon(version: str, flag: object) -> None:
    option = flag.option  # type: ignore[attr-defined]
    if option in parser_of(version)._option_string_actions or flag.dest in OF_ANY:
        return
    parser = parser_of(version)
    add_flags(parser)
    action = parser._option_string_actions[option]
    value = [] if action.nargs == 0 else [str((action.choices or ["1"])[0])]  # type: ignore[index]
    args = parser.parse_args(["--optimizer", "sgd", option, *value])
    with pytest.raises(
        ValueError, match=f"{option} is for .*this run has --optimizer sgd"
    ):
        remove_flags(args)


@EVERY
@pytest.mark.parametrize(
    ("given", "kept", "any_optimizer"),
    [
        ("--weight-decay-all-params", {"weight_decay_all_params": True}, False),
        ("--muon-qk-clip 30", {"muon_qk_clip": 30.0}, False),
        ("--muon-cpu", {"muon_cpu": True}, True),
        (
            "--adamw-from-muon --no-muon-checkpoint-digest",
            {"adamw_from_muon": True, "no_muon_checkpoint_digest": True},
            False,
        ),
    ],
)
def test_adamw_may_have_some_flags_and_any_optimizer_the_cpu(
    version: str, given: str, kept: dict[str, object], any_optimizer: bool
) -> None:
    for optimizer in ("adam", "sgd"):
        args = parsed(version, "--optimizer", optimizer, given)
        if optimizer == "sgd" and not any_optimizer:
            with pytest.raises(ValueError, match=f"{given.split()[0]}.* is for"):
                remove_flags(args)
            continue
        remove_flags(args)
        expected = vars(parser_of(version).parse_args(["--optimizer", optimizer]))
        assert vars(args) == {**expected, **kept}


@WITH_MUON
@pytest.mark.parametrize("name", MUONS)
def test_megatrons_own_muon_keeps_its_flags(version: str, name: str) -> None:
    given = ["--optimizer", name, "--muon-tp-mode", "blockwise"]
    if name not in parser_of(version)._option_string_actions["--optimizer"].choices:
        pytest.skip("no such optimizer of Megatron's")
    assert asks_for_muon(parsed(version, *given))
    args = parsed(version, *given, "--muon-backend upstream")
    assert not asks_for_muon(args)
    remove_flags(args)
    expected = vars(parser_of(version).parse_args(given))
    assert vars(args) == {**expected, "muon_backend": "upstream"}
    assert not asks_for_muon(args)


# --- a run that is --------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("given", MEANINGS)
def test_what_is_in_force_is_written(version: str, given: str) -> None:
    args = parsed(version, given)
    config = muon_config(args)
    write_all(args, config)
    before = vars(parser_of(version).parse_args([]))
    for dest, default in before.items():
        if "muon" in dest:
            assert type(getattr(args, dest)) is type(default), dest
    unset = {flag.dest for flag in FLAGS if getattr(args, flag.dest) is None}
    optional = (
        "momentum_warmup ns_iteration split_matrices log_interval qk_clip".split()
    )
    expected = {f"muon_{name}" for name in optional if getattr(config, name) is None}
    if config.qk_clip is None:
        expected.add("muon_qk_clip_alpha")
    if config.scale_mode not in ("spectral", "update_norm"):
        expected.add("muon_matched_adamw_rms")
    assert unset == expected
    assert args.muon_extra_scale_factor == config.matched_adamw_rms
    assert (args.muon_nesterov, args.no_muon_nesterov) == (
        config.nesterov,
        not config.nesterov,
    )
    json.dumps(vars(args))  # plain values
    assert muon_config(args) == config


@pytest.mark.usefixtures("newer_option")
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_what_is_in_force_is_written_whichever_of_torchs_options_was_set(
    dtype: str,
) -> None:
    """torch's old option cannot be read where a new one contradicts it."""
    args = parsed("0.16", "--optimizer muon --muon-ns-dtype", dtype)
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    write_all(args, muon_config(args))
    assert args.muon_ns_dtype == dtype


# --- a command line -------------------------------------------------------------------


def test_options_of_muons_are_found_on_a_line() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--muon-new", type=int)
    add_flags(parser)
    line = (
        "--lr 1 --optimizer muon --muon-new 3 --muon-momentum=0.9 "
        "--weight-decay-all-params"
    )
    options = [
        "--optimizer muon",
        "--muon-new",
        "--muon-momentum=0.9",
        "--weight-decay-all-params",
    ]
    assert given_on(parser, line.split()) == options
    assert given_on(parser, ["--optimizer", "adam", "muon"]) == []
    for line in (["--optimizer", "dist_muon"], ["--optimizer=dist_muon"]):
        assert given_on(parser, line) == ["--optimizer dist_muon"]
