"""Muon's flags on a bare parser that declares what each Megatron-LM declares."""

from __future__ import annotations

import re

import pytest

from megatron_muon import MuonConfig
from megatron_muon.megatron_lm.flags.namespace import (
    differences,
    rename_megatrons,
    restore_defaults,
    write_all,
)
from megatron_muon.megatron_lm.flags.parser import (
    add_flags,
    muon_backend,
    shorten_errors,
)
from megatron_muon.settings import left
from megatron_muon.settings.flags import MUONS, muon_config
from megatron_muon.settings.run_flags import FLAGS
from support import ROOT
from support.megatron_lm.flag_parsers import (
    EVERY,
    MEANINGS,
    WITH_MUON,
    config_of,
    parsed,
    parser_of,
)

# Upstream's defaults, but for the coefficients.
MEANT = ("--muon-defaults", "upstream", "--muon-coefficient-type", "simple")

# --- what the parser has --------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("name", MUONS)
def test_muon_is_an_optimizer_once_beside_megatrons(version: str, name: str) -> None:
    parser = parser_of(version)
    before = list(parser._option_string_actions["--optimizer"].choices or ())
    add_flags(parser)
    after = list(parser._option_string_actions["--optimizer"].choices or ())
    assert parser.parse_args(["--optimizer", name]).optimizer == name
    assert [n for n in after if n not in MUONS] == [n for n in before if n not in MUONS]
    assert after.count(name) == 1


@EVERY
def test_every_flag_is_known_and_says_what_it_is_and_its_default(version: str) -> None:
    parser = parser_of(version)
    add_flags(parser)
    for flag in FLAGS:
        action = parser._option_string_actions[flag.option]
        assert action.help and "default" in action.help, flag.option
        assert action.default is None, flag.option
        assert f" A flag of {flag.source}. " in action.help
    assert "--muon-homes" in parser.format_help()  # its text has no stray %


@EVERY
def test_megatrons_defaults_come_back_and_what_was_given_stays(version: str) -> None:
    before = vars(parser_of(version).parse_args([]))
    args = parsed(version)
    restore_defaults(args)
    assert before.items() <= vars(args).items()
    args = parsed(version, "--muon-momentum", "0.5", "--muon-no-split-qkv")
    restore_defaults(args)
    assert args.muon_momentum == 0.5 and args.muon_split_qkv is False


@pytest.mark.parametrize("name", left.FORK)
def test_a_flag_of_moonshots_fork_ends_in_what_it_is_today(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of("0.17")
    add_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([name, "1"])
    said = capsys.readouterr().err
    of_fork = "is a flag of Moonshot's fork of Megatron; today"
    assert said == f"{parser.prog}: error: {name} {of_fork}: {left.FORK[name]}\n"
    theirs = parser_of("0.17")
    theirs.add_argument(name, dest="known")  # as that fork has it
    add_flags(theirs)
    assert theirs.parse_args([name, "1"]).known == "1"


def test_the_answer_to_a_forks_flag_is_that_of_the_recipes_table() -> None:
    page = (ROOT / "examples" / "moe_1b" / "README.md").read_text()
    rows = re.findall(r"^\| (`--.*) \| (.*) \|$", page, re.MULTILINE)
    table = {
        name: today
        for flags, today in rows
        for name in re.findall(r"`(--[\w-]+)", flags)
    }
    texts = {name: table[name].replace("`", "") for name in left.FORK}
    assert texts == left.FORK


@EVERY
def test_a_mistyped_flag_ends_in_one_line_with_the_nearest(
    version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of(version)
    add_flags(parser)
    shorten_errors(parser)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--muon-ns-step", "6", "--no-such"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert "error: unrecognized arguments: --muon-ns-step 6 --no-such; the near" in said
    assert said.endswith("the nearest: --muon-ns-steps, --muon-num-ns-steps\n")
    with pytest.raises(SystemExit):
        parser.parse_args(["--muon-momentum", "high"])  # argparse's own, as before
    assert capsys.readouterr().err.startswith("usage: ")


# --- meanings -------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("which", MEANINGS)
def test_a_flag_keeps_its_meaning(version: str, which: str) -> None:
    given, settings = MEANINGS[which]
    assert config_of(version, *given) == MuonConfig(**settings)  # type: ignore[arg-type]


REFUSED = {
    "high": (
        ["--muon-fp32-matmul-prec", "high"],
        "--muon-fp32-matmul-prec high .*ns-dtype",
    ),
    "septic": (
        ["--muon-coefficient-type", "septic"],
        "one of simple, quintic.*got 'septic'",
    ),
    "custom": (
        ["--muon-coefficient-type", "custom"],
        "custom: give the numbers, --muon-ns-coeff",
    ),
    "two numbers": (
        ["--muon-ns-coefficients", "1,2"],
        "a name or a,b,c;a,b,c;..., got '1,2'",
    ),
    "two sets": (
        ["--muon-ns-coefficients", "quintic", "--muon-coefficient-type", "simple"],
        "quintic and --muon-coefficient-type simple contradict each other",
    ),
    "gram, untested": (
        ["--muon-ns-iteration", "gram", "--muon-ns-steps", "7"],
        r"ns_steps .* 7, ",
    ),
    "lion": (
        ["--muon-scalar-optimizer", "lion"],
        "--muon-scalar-optimizer lion .*leave it out",
    ),
    "syrk": (["--muon-use-syrk"], "--muon-use-syrk has no meaning .*leave it out"),
    "blockwise": (
        ["--muon-tp-mode", "blockwise", "--tensor-model-parallel-size", "2"],
        "--muon-tp-mode blockwise .*slice by itself.*give --muon-tp-mode duplicated",
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
        r"--no-muon-nesterov \(off\) and --muon-nesterov \(on\) contradict",
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
    "link speed": (["--muon-link-gbytes", "nan"], r"from 1e-09 to 1e\+09, got nan"),
    "out of range": (["--muon-momentum", "1.0"], r"-momentum\) must be in"),
}


@EVERY
@pytest.mark.parametrize("which", REFUSED)
def test_a_flag_without_a_meaning_or_against_another_is_refused(
    version: str, which: str
) -> None:
    given, message = REFUSED[which]
    with pytest.raises(ValueError, match=message):
        config_of(version, *given)


def test_every_flag_has_a_meaning_or_an_error() -> None:
    tried = {
        word for given, _ in [*MEANINGS.values(), *REFUSED.values()] for word in given
    }
    assert {flag.option for flag in FLAGS} <= tried


def test_a_flag_of_megatrons_own_muon_that_is_not_known_is_refused_and_keeps_its_default() -> (
    None
):
    parser = parser_of("0.19", **{"--muon-new": {"type": int, "default": 3}})
    add_flags(parser)
    args = parser.parse_args([])
    assert muon_config(args) == MuonConfig()
    write_all(args, MuonConfig())
    assert args.muon_new == 3
    with pytest.raises(
        ValueError, match=r"--muon-new 4 .*does not know.*--muon-backend upstream"
    ):
        muon_config(parser.parse_args(["--muon-new", "4"]))


# --- defaults -------------------------------------------------------------------------


@EVERY
def test_in_deterministic_mode_no_matrix_is_shared_unless_asked(version: str) -> None:
    for given, expected in (((), "off"), (("--muon-split-matrices", "auto"), "auto")):
        args = parsed(version, *given)
        args.deterministic_mode = True
        assert muon_config(args).split_matrices == expected


@WITH_MUON
def test_upstreams_defaults_where_they_have_a_meaning(version: str) -> None:
    upstreams = MuonConfig(
        matched_adamw_rms=1.0, momentum=0.9, nesterov=False, ns_dtype="bf16"
    )
    assert config_of(version, *MEANT) == upstreams
    given = config_of(
        version, *MEANT, "--muon-momentum", "0.8", "--muon-matched-adamw-rms", "0.2"
    )
    assert given == MuonConfig(momentum=0.8, nesterov=False, ns_dtype="bf16")
    assert config_of(version, *MEANT[:2]).ns_coefficients == "quintic"
    assert config_of(version, *MEANT, "--muon-rule", "hyperball").rule == "hyperball"


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
    with pytest.raises(
        ValueError, match="--muon-defaults upstream: this Megatron has no Muon"
    ):
        config_of("0.12", "--muon-defaults", "upstream")


# --- what is printed at start ---------------------------------------------------------

UNLIKE = "unlike the defaults of Megatron's own Muon: "


@WITH_MUON
def test_every_value_that_differs_from_megatrons_own_is_printed(version: str) -> None:
    assert differences(parsed(version, "--muon-preset", "fast")) == [
        f"{UNLIKE}--muon-extra-scale-factor 0.2 (1.0), --muon-momentum 0.95 (0.9), "
        "nesterov (--no-muon-nesterov) True (False), --muon-coefficient-type simple "
        "(quintic), --muon-ns-dtype fp16 on a GPU (bf16)"
    ]


def test_a_megatron_without_a_muon_of_its_own_has_no_defaults_to_differ_from() -> None:
    assert differences(parsed("0.12")) == []


# --- Megatron's own Muon --------------------------------------------------------------


@WITH_MUON
@pytest.mark.parametrize("given", [(), ("--muon-momentum", "0.8", "--muon-nesterov")])
def test_dist_muon_is_muon_with_megatrons_own_defaults(
    version: str, given: tuple[str, ...]
) -> None:
    """As from Python: Moonlight's scale would make the updates of its lines five times
    smaller.
    """
    args = parsed(version, "--optimizer", "dist_muon", *given)
    (line,) = rename_megatrons(args)
    new = "--optimizer muon --muon-defaults"
    assert f"dist_muon is megatron_muon's Muon here; its name is {new} up" in line
    assert args.optimizer == "muon"
    assert muon_config(args) == config_of(
        version, "--muon-defaults", "upstream", *given
    )
    assert rename_megatrons(args) == []
    named = "--optimizer", "dist_muon", "--muon-defaults", "moonlight"
    own = parsed(version, *named, *given)
    assert rename_megatrons(own)[0].count(f"{new} moonlight") == 1
    assert muon_config(own) == config_of(version, *given)


def test_adaptive_muon_is_refused_with_the_rules_to_take() -> None:
    args = parsed("0.19", "--optimizer", "adaptive_muon")
    said = "--optimizer muon with --muon-rule normuon or namo .* own class"
    with pytest.raises(ValueError, match=f"^--optimizer adaptive_muon: .*{said}"):
        rename_megatrons(args)
    assert args.optimizer == "adaptive_muon"


def test_before_megatron_had_a_muon_dist_muon_is_muon_alone() -> None:
    args = parsed("0.12", "--optimizer", "dist_muon")
    assert "its name is --optimizer muon (" in rename_megatrons(args)[0]
    assert muon_config(args) == MuonConfig()


@WITH_MUON
def test_dist_muon_over_tp_ranks_orthogonalizes_whole_matrices_and_warns(
    version: str,
) -> None:
    given = ("--optimizer", "dist_muon", "--tensor-model-parallel-size", "2")
    args = parsed(version, *given)
    by_default = args.megatron_muon_defaults["muon_tp_mode"]
    lines = rename_megatrons(args)
    assert ("warning: " in lines[-1]) == (by_default == "blockwise")
    assert muon_config(args) == config_of(version, "--muon-defaults", "upstream")
    asked = parsed(version, *given, "--muon-tp-mode", "blockwise")
    rename_megatrons(asked)
    with pytest.raises(ValueError, match="--muon-tp-mode blockwise has no meaning"):
        muon_config(asked)


@EVERY
def test_the_plugin_runs_muon_unless_it_is_told_otherwise(version: str) -> None:
    assert muon_backend(parsed(version)) == "plugin"
    assert muon_backend(parsed(version, "--muon-backend", "plugin")) == "plugin"


def test_megatrons_own_muon_needs_a_megatron_that_has_one() -> None:
    with pytest.raises(
        ValueError, match="--muon-backend upstream: this Megatron has no Muon"
    ):
        muon_backend(parsed("0.12", "--muon-backend", "upstream"))


@WITH_MUON
def test_megatrons_own_muon_takes_its_own_flags_and_no_other(version: str) -> None:
    upstream = ("--muon-backend", "upstream")
    assert (
        muon_backend(parsed(version, *upstream, "--muon-tp-mode", "blockwise"))
        == "upstream"
    )
    with pytest.raises(ValueError, match="has no --muon-homes in this version"):
        muon_backend(parsed(version, *upstream, "--muon-homes", "local"))
    with pytest.raises(ValueError, match="has no --no-muon-nesterov"):
        muon_backend(parsed(version, *upstream, "--no-muon-nesterov"))
    assert muon_backend(parsed(version, *upstream, "--muon-cpu")) == "upstream"
