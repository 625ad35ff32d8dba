"""Muon's flags on a bare parser that declares what each Megatron-LM declares."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_muon import MuonConfig
from megatron_muon.cli import main
from megatron_muon.cli.scales import update_rms
from megatron_muon.training.flag_table import FLAGS
from megatron_muon.training.flags import (
    add_flags,
    differences,
    muon_backend,
    muon_config,
    restore_defaults,
)
from megatron_muon.update import update_scale

# megatron/training/arguments.py at core_v0.12.0 (as until 0.15.3), 0.16.1, 0.17.1, 0.19.0 (as
# 0.18.2), and after it; what is new in each.
_SCALE_MODES = ["spectral", "unit_rms_norm", "shape_scaling"]
_TP_MODES = ["blockwise", "duplicated", "distributed"]
_V16: dict[str, dict[str, Any]] = {
    "--muon-momentum": {"type": float, "default": 0.9},
    "--muon-no-split-qkv": {"action": "store_false", "default": True, "dest": "muon_split_qkv"},
    "--muon-use-nesterov": {"action": "store_true"},
    "--muon-scale-mode": {"type": str, "default": "spectral", "choices": _SCALE_MODES},
    "--muon-fp32-matmul-prec": {
        **{"type": str, "default": "medium"},
        "choices": ["low", "medium", "high"],
    },
    "--muon-num-ns-steps": {"type": int, "default": 5},
    "--muon-tp-mode": {"type": str, "default": "blockwise", "choices": _TP_MODES},
    "--muon-extra-scale-factor": {"type": float, "default": 1.0},
}
_V17 = {
    **_V16,
    "--muon-coefficient-type": {"type": str, "default": "quintic"},
    "--muon-scalar-optimizer": {"type": str, "default": "adam", "choices": ["adam", "lion"]},
}
_V19 = {
    **{option: keywords for option, keywords in _V17.items() if option != "--muon-use-nesterov"},
    "--muon-nesterov": {"action": "store_true"},
}
_LATER = {
    **_V19,
    "--muon-use-syrk": {"action": "store_true"},
    "--muon-tp-mode": {"type": str, "default": "duplicated", "choices": _TP_MODES},
}
DECLARED = {"0.12": {}, "0.16": _V16, "0.17": _V17, "0.19": _V19, "later": _LATER}
OPTIMIZERS = {
    "0.12": ["adam", "sgd"],
    "0.16": ["adam", "sgd", "muon", "dist_muon"],
    "0.17": ["adam", "sgd", "muon", "dist_muon", "lion"],
}
EVERY = pytest.mark.parametrize("version", DECLARED)
WITH_MUON = pytest.mark.parametrize("version", ["0.16", "0.17", "0.19", "later"])
# What upstream's defaults need before they have a meaning here.
MEANT = ("--muon-defaults", "upstream", "--muon-coefficient-type", "simple")


def parser_of(version: str, **more: dict[str, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    choices = OPTIMIZERS.get(version, [*OPTIMIZERS["0.17"], "soap", "adaptive_muon"])
    parser.add_argument("--optimizer", default="adam", choices=choices)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--expert-tensor-parallel-size", type=int, default=None)
    for option, keywords in {**DECLARED[version], **more}.items():
        parser.add_argument(option, **keywords)
    return parser


def parsed(version: str, *given: str) -> Namespace:
    parser = parser_of(version)
    add_flags(parser)
    return parser.parse_args(given)


def config_of(version: str, *given: str) -> MuonConfig:
    return muon_config(parsed(version, *given))


# --- what the parser has ---------------------------------------------------------------------


@EVERY
def test_muon_is_an_optimizer_once_beside_megatrons(version: str) -> None:
    parser = parser_of(version)
    before = list(parser._option_string_actions["--optimizer"].choices or ())
    add_flags(parser)
    after = list(parser._option_string_actions["--optimizer"].choices or ())
    assert parser.parse_args(["--optimizer", "muon"]).optimizer == "muon"
    assert [name for name in after if name != "muon"] == [n for n in before if n != "muon"]
    assert after.count("muon") == 1


@EVERY
def test_every_flag_is_known_and_says_what_it_is_and_its_default(version: str) -> None:
    parser = parser_of(version)
    add_flags(parser)
    for flag in FLAGS:
        action = parser._option_string_actions[flag.option]
        assert action.help and "default" in action.help, flag.option
        assert action.default is None, flag.option
        assert any(said in action.help for said in ("arXiv", "Megatron's own", "megatron_muon"))
    assert "--muon-homes" in parser.format_help()  # its text has no stray %


@EVERY
def test_megatrons_own_actions_stay(version: str) -> None:
    parser = parser_of(version)
    before = dict(parser._option_string_actions)
    add_flags(parser)
    assert before.items() <= parser._option_string_actions.items()


@EVERY
def test_megatrons_defaults_come_back_and_what_was_given_stays(version: str) -> None:
    before = vars(parser_of(version).parse_args([]))
    args = parsed(version)
    restore_defaults(args)
    assert before.items() <= vars(args).items()
    args = parsed(version, "--muon-momentum", "0.5", "--muon-no-split-qkv")
    restore_defaults(args)
    assert args.muon_momentum == 0.5 and args.muon_split_qkv is False


# --- scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "square", "tall", "wide"),
    [("spectral", 8.0, 16.0, 16.0), ("unit_rms_norm", 1.0, 2.0, 0.5), ("shape_scaling", 1, 2, 1)],
)
def test_a_scale_goes_by_the_whole_matrix(
    mode: Any, square: float, tall: float, wide: float
) -> None:
    """Emerging-Optimizers' get_muon_scale_factor(size_out, size_in), by hand."""
    config = MuonConfig(scale_mode=mode, matched_adamw_rms=0.5)
    found = [update_scale(*shape, config) for shape in ((64, 64), (256, 64), (64, 256))]
    assert found == [0.5 * square, 0.5 * tall, 0.5 * wide]


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
@pytest.mark.parametrize("shape", [(24, 24), (48, 12), (12, 48)], ids=str)
def test_the_table_has_the_rms_of_an_update(mode: Any, shape: tuple[int, int]) -> None:
    """Of an orthogonal direction, in float64; QR's rounding is far below 1e-12."""
    config = MuonConfig(scale_mode=mode)
    rows, cols = shape
    generator = torch.Generator().manual_seed(0)
    tall = torch.randn(max(shape), min(shape), generator=generator, dtype=torch.float64)
    direction = torch.linalg.qr(tall).Q
    update = update_scale(rows, cols, config) * (direction if rows >= cols else direction.T)
    assert float(update.square().mean().sqrt()) == pytest.approx(
        update_rms(rows, cols, config), rel=1e-12
    )


def test_scales_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scales", "--hidden-size", "64", "--factor", "0.2", "1"]) == 0
    assert "| `unit_rms_norm` | 1 | 0.125 | 0.125 | 0.0312 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["scales", "--factor", "-1"])
    assert "matched_adamw_rms must be above 0" in capsys.readouterr().err


LEGACY_EXPERTS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --bf16 "
    "--num-experts 2 --moe-grouped-gemm --disable-bias-linear --transformer-impl local "
    "--position-embedding-type rope --use-distributed-optimizer"
).split()


def test_transposed_experts_have_one_scale_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["routes", *LEGACY_EXPERTS]) == 0
    with pytest.raises(SystemExit):
        main(["routes", *LEGACY_EXPERTS, "--muon-scale-mode", "shape_scaling"])
    said = capsys.readouterr().err
    assert "experts.weight1: scale_mode 'shape_scaling'" in said and "use 'spectral'" in said


# --- meanings --------------------------------------------------------------------------------

MEANINGS: dict[str, tuple[Sequence[str], dict[str, object]]] = {
    "matched-rms": (["--muon-matched-adamw-rms", "0.4"], {"matched_adamw_rms": 0.4}),
    "extra-factor": (["--muon-extra-scale-factor", "0.4"], {"matched_adamw_rms": 0.4}),
    "momentum": (["--muon-momentum", "0.9"], {"momentum": 0.9}),
    "ns-steps": (["--muon-ns-steps", "7"], {"ns_steps": 7}),
    "num-ns-steps": (["--muon-num-ns-steps", "7"], {"ns_steps": 7}),
    "no-nesterov": (["--no-muon-nesterov"], {"nesterov": False}),
    "nesterov": (["--muon-nesterov"], {"nesterov": True}),
    "use-nesterov": (["--muon-use-nesterov"], {"nesterov": True}),
    "spectral": (["--muon-scale-mode", "spectral"], {"scale_mode": "spectral"}),
    "unit-rms": (
        ["--muon-scale-mode", "unit_rms_norm"],
        {"scale_mode": "unit_rms_norm", "matched_adamw_rms": 1.0},
    ),
    "shape-scaling": (
        ["--muon-scale-mode", "shape_scaling", "--muon-extra-scale-factor", "0.3"],
        {"scale_mode": "shape_scaling", "matched_adamw_rms": 0.3},
    ),
    "simple": (["--muon-coefficient-type", "simple"], {}),
    "medium": (["--muon-fp32-matmul-prec", "medium"], {"ns_dtype": "bf16"}),
    "no-split-qkv": (["--muon-no-split-qkv"], {"split_qkv": False}),
    "duplicated": (
        ["--muon-tp-mode", "duplicated", "--tensor-model-parallel-size", "2"],
        {},
    ),
    "blockwise, TP 1": (["--muon-tp-mode", "blockwise"], {}),
    "distributed, TP 1": (["--muon-tp-mode", "distributed"], {}),
    "scalar-adam": (["--muon-scalar-optimizer", "adam"], {}),
    "decay-all": (["--weight-decay-all-params"], {"weight_decay_all_params": True}),
    "include": (
        ["--muon-include", "a.*", "--muon-include", "b"],
        {"muon_include": ("a.*", "b")},
    ),
    "exclude": (["--muon-exclude", "*.router.weight"], {"muon_exclude": ("*.router.weight",)}),
    "homes": (["--muon-homes", "local"], {"homes": "local"}),
    "ns-dtype": (["--muon-ns-dtype", "fp32"], {"ns_dtype": "fp32"}),
    "no-digest": (["--no-muon-checkpoint-digest"], {"checkpoint_digest": False}),
    "from-adamw": (["--muon-from-adamw", "momentum"], {}),
    "moonlight": (["--muon-defaults", "moonlight"], {}),
    "backend": (["--muon-backend", "plugin"], {}),
    "twice the same": (["--muon-ns-steps", "7", "--muon-num-ns-steps", "7"], {"ns_steps": 7}),
}


@EVERY
@pytest.mark.parametrize("which", MEANINGS)
def test_a_flag_keeps_its_meaning(version: str, which: str) -> None:
    given, settings = MEANINGS[which]
    assert config_of(version, *given) == MuonConfig(**settings)  # type: ignore[arg-type]


REFUSED = {
    "high": (["--muon-fp32-matmul-prec", "high"], "--muon-fp32-matmul-prec high .*ns-dtype"),
    "low": (["--muon-fp32-matmul-prec", "low"], "--muon-fp32-matmul-prec low .*ns-dtype"),
    "quintic": (["--muon-coefficient-type", "quintic"], "coefficient-type quintic .*give .*simple"),
    "lion": (["--muon-scalar-optimizer", "lion"], "--muon-scalar-optimizer lion .*leave it out"),
    "syrk": (["--muon-use-syrk"], "--muon-use-syrk has no meaning .*leave it out"),
    "blockwise": (
        ["--muon-tp-mode", "blockwise", "--tensor-model-parallel-size", "2"],
        "--muon-tp-mode blockwise .*slice by itself.*give --muon-tp-mode duplicated",
    ),
    "distributed": (
        ["--muon-tp-mode", "distributed", "--tensor-model-parallel-size", "2"],
        "--muon-tp-mode distributed .*give --muon-tp-mode duplicated",
    ),
    "blockwise, expert TP": (
        ["--muon-tp-mode", "blockwise", "--expert-tensor-parallel-size", "2"],
        "--muon-tp-mode blockwise ",
    ),
    "steps": (
        ["--muon-ns-steps", "5", "--muon-num-ns-steps", "6"],
        "--muon-ns-steps 5 and --muon-num-ns-steps 6 contradict",
    ),
    "rms": (
        ["--muon-matched-adamw-rms", "0.2", "--muon-extra-scale-factor", "1.0"],
        "--muon-matched-adamw-rms 0.2 and --muon-extra-scale-factor 1.0 contradict",
    ),
    "nesterov": (
        ["--muon-nesterov", "--no-muon-nesterov"],
        r"--muon-nesterov \(on\) and --no-muon-nesterov \(off\) contradict",
    ),
    "use-nesterov": (["--muon-use-nesterov", "--no-muon-nesterov"], "contradict"),
    "dtype": (
        ["--muon-ns-dtype", "fp32", "--muon-fp32-matmul-prec", "medium"],
        "--muon-ns-dtype fp32 and --muon-fp32-matmul-prec medium contradict",
    ),
    "rms of another mode": (
        ["--muon-matched-adamw-rms", "0.2", "--muon-scale-mode", "shape_scaling"],
        "--muon-matched-adamw-rms 0.2 with --muon-scale-mode shape_scaling",
    ),
    "adamw-from-muon": (["--adamw-from-muon"], "is for --optimizer adam"),
    "out of range": (["--muon-momentum", "1.0"], "momentum must be in"),
}


@EVERY
@pytest.mark.parametrize("which", REFUSED)
def test_a_flag_without_a_meaning_or_against_another_is_refused(version: str, which: str) -> None:
    given, message = REFUSED[which]
    with pytest.raises(ValueError, match=message):
        config_of(version, *given)


def test_every_flag_has_a_meaning_or_an_error() -> None:
    tried = {word for given, _ in [*MEANINGS.values(), *REFUSED.values()] for word in given}
    assert {flag.option for flag in FLAGS} <= tried


def test_a_flag_of_megatrons_own_muon_that_is_not_known_is_refused() -> None:
    parser = parser_of("0.19", **{"--muon-new": {"type": int, "default": 3}})
    add_flags(parser)
    assert muon_config(parser.parse_args([])) == MuonConfig()
    with pytest.raises(ValueError, match=r"--muon-new 4 .*does not know.*--muon-backend upstream"):
        muon_config(parser.parse_args(["--muon-new", "4"]))


# --- defaults --------------------------------------------------------------------------------


@EVERY
def test_the_defaults_are_moonlights(version: str) -> None:
    assert config_of(version, "--tensor-model-parallel-size", "8") == MuonConfig()


@WITH_MUON
def test_upstreams_defaults_where_they_have_a_meaning(version: str) -> None:
    upstreams = MuonConfig(matched_adamw_rms=1.0, momentum=0.9, nesterov=False)
    assert config_of(version, *MEANT) == upstreams
    given = config_of(version, *MEANT, "--muon-momentum", "0.8", "--muon-matched-adamw-rms", "0.2")
    assert given == MuonConfig(momentum=0.8, nesterov=False)


@WITH_MUON
def test_upstreams_defaults_without_a_meaning_are_refused(version: str) -> None:
    with pytest.raises(ValueError, match=r"type quintic \(Megatron's own default.*give .*simple"):
        config_of(version, "--muon-defaults", "upstream")


@WITH_MUON
def test_upstreams_default_of_the_tp_mode(version: str) -> None:
    tp2 = (*MEANT, "--tensor-model-parallel-size", "2")
    if version == "later":
        assert config_of(version, *tp2).momentum == 0.9
        return
    with pytest.raises(ValueError, match=r"--muon-tp-mode blockwise .*own default"):
        config_of(version, *tp2)
    assert config_of(version, *tp2, "--muon-tp-mode", "duplicated").momentum == 0.9


def test_upstreams_defaults_need_a_megatron_that_has_them() -> None:
    with pytest.raises(ValueError, match="--muon-defaults upstream: this Megatron has no Muon"):
        config_of("0.12", "--muon-defaults", "upstream")


# --- what is printed at start ----------------------------------------------------------------


@WITH_MUON
def test_every_value_that_differs_from_megatrons_own_is_told(version: str) -> None:
    nesterov = "--muon-use-nesterov" if version in ("0.16", "0.17") else "--muon-nesterov"
    assert differences(parsed(version)) == [
        "--muon-momentum 0.95 here, Megatron's own default is 0.9",
        f"{nesterov} True here, Megatron's own default is False",
        "--muon-extra-scale-factor 0.2 here, Megatron's own default is 1.0",
        "--muon-coefficient-type simple here, Megatron's own default is quintic",
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--muon-scale-mode", "unit_rms_norm"], "--muon-scale-mode unit_rms_norm here, .* spect"),
        (["--muon-ns-steps", "6"], "--muon-num-ns-steps 6 here, Megatron's own default is 5"),
        (["--muon-ns-dtype", "fp32"], "--muon-ns-dtype fp32 here, Megatron's own default is bf16"),
        (["--muon-no-split-qkv"], "no-split-qkv.* False here, Megatron's own default is True"),
        (["--weight-decay-all-params"], "--weight-decay-all-params True here, .* False"),
        (["--tensor-model-parallel-size", "2"], "--muon-tp-mode duplicated here, .* blockwise"),
        (["--muon-tp-mode", "duplicated"], "once and whole, at its home, with the same result"),
    ],
)
def test_a_value_that_differs_is_told_once(given: list[str], told: str) -> None:
    before = differences(parsed("0.17"))
    new = [line for line in differences(parsed("0.17", *given)) if line not in before]
    assert any(re.search(told, line) for line in new)


@WITH_MUON
def test_with_upstreams_defaults_only_what_was_given_differs(version: str) -> None:
    assert differences(parsed(version, *MEANT)) == [
        "--muon-coefficient-type simple here, Megatron's own default is quintic"
    ]


def test_a_megatron_without_a_muon_of_its_own_has_no_defaults_to_differ_from() -> None:
    assert differences(parsed("0.12")) == []


# --- Megatron's own Muon ---------------------------------------------------------------------


@EVERY
def test_the_plugin_runs_muon_unless_it_is_told_otherwise(version: str) -> None:
    assert muon_backend(parsed(version)) == "plugin"
    assert muon_backend(parsed(version, "--muon-backend", "plugin")) == "plugin"


def test_megatrons_own_muon_needs_a_megatron_that_has_one() -> None:
    with pytest.raises(ValueError, match="--muon-backend upstream: this Megatron has no Muon"):
        muon_backend(parsed("0.12", "--muon-backend", "upstream"))


@WITH_MUON
def test_megatrons_own_muon_takes_its_own_flags_and_no_other(version: str) -> None:
    upstream = ("--muon-backend", "upstream")
    assert muon_backend(parsed(version, *upstream, "--muon-tp-mode", "blockwise")) == "upstream"
    with pytest.raises(ValueError, match="has no --muon-homes in this version"):
        muon_backend(parsed(version, *upstream, "--muon-homes", "local"))
    with pytest.raises(ValueError, match="has no --no-muon-nesterov"):
        muon_backend(parsed(version, *upstream, "--no-muon-nesterov"))
