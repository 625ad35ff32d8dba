"""Muon's flags on a bare parser that declares what each Megatron-LM declares."""

from __future__ import annotations

import re

import pytest

from megatron_muon import MuonConfig
from megatron_muon.megatron_lm.flags.namespace import (
    refuse_megatrons_names,
    remove_flags,
    restore_defaults,
    write_all,
)
from megatron_muon.megatron_lm.flags.parser import (
    add_flags,
    shorten_errors,
)
from megatron_muon.megatron_lm.install import asks_for_muon
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

# --- what the parser has --------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("name", MUONS)
def test_muon_is_an_optimizer_once_beside_megatrons(version: str, name: str) -> None:
    parser = parser_of(version)
    action = parser._option_string_actions["--optimizer"]
    before = [*action.choices]
    add_flags(parser)
    after = [*action.choices]
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
    args = parsed(version, "--muon-momentum 0.5 --muon-no-split-qkv")
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
@pytest.mark.parametrize("given", MEANINGS)
def test_a_flag_keeps_its_meaning(version: str, given: str) -> None:
    assert config_of(version, given) == MuonConfig(**MEANINGS[given])


REFUSED = {
    "--muon-coefficient-type septic": "one of simple, quintic.*got 'septic'",
    "--muon-coefficient-type custom": "custom: give the numbers, --muon-ns-coeff",
    "--muon-ns-coefficients 1,2": "a name or a,b,c;a,b,c;..., got '1,2'",
    "--muon-ns-coefficients quintic --muon-coefficient-type simple": "quintic and --muon-coefficient-type simple contradict each other",
    "--muon-ns-iteration gram --muon-ns-steps 7": r"ns_steps .* 7, ",
    "--muon-ns-steps 5 --muon-num-ns-steps 6": "--muon-ns-steps 5 and --muon-num-ns-steps 6 contradict",
    "--muon-matched-adamw-rms 0.2 --muon-extra-scale-factor 1.0": "--muon-matched-adamw-rms 0.2 and --muon-extra-scale-factor 1.0 contradict",
    "--muon-nesterov --no-muon-nesterov": r"--no-muon-nesterov \(off\) and --muon-nesterov \(on\) contradict",
    "--muon-use-nesterov --no-muon-nesterov": "contradict",
    "--muon-matched-adamw-rms 0.2 --muon-scale-mode shape_scaling": "--muon-matched-adamw-rms 0.2 with --muon-scale-mode shape_scaling",
    "--adamw-from-muon": "is for --optimizer adam",
    "--muon-momentum 1.0": r"-momentum\) must be in",
    "--muon-qk-clip nan": r"from 1e-09 to 1e\+09, got nan",
}


@EVERY
@pytest.mark.parametrize("given", REFUSED)
def test_a_flag_without_a_meaning_or_against_another_is_refused(
    version: str, given: str
) -> None:
    with pytest.raises(ValueError, match=REFUSED[given]):
        config_of(version, given)


def test_every_flag_has_a_meaning_or_an_error() -> None:
    tried = " ".join([*MEANINGS, *REFUSED]).split()
    assert {flag.option for flag in FLAGS} <= {*tried}


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
        ValueError, match=r"--muon-new 4 has no meaning .*--muon-backend upstream"
    ):
        muon_config(parser.parse_args(["--muon-new", "4"]))


# --- defaults -------------------------------------------------------------------------


@EVERY
def test_in_deterministic_mode_no_matrix_is_shared_unless_asked(version: str) -> None:
    for given, expected in (("", "off"), ("--muon-split-matrices auto", "auto")):
        args = parsed(version, given)
        args.deterministic_mode = True
        assert muon_config(args).split_matrices == expected


# --- Megatron's own Muon --------------------------------------------------------------

UPSTREAM = "--optimizer muon --muon-backend upstream"
# flags of Megatron's own Muon that are no setting here, and what is said of them
DONE_HERE = [
    "--muon-tp-mode duplicated --tensor-model-parallel-size 2",
    "--muon-tp-mode blockwise",
    "--muon-tp-mode distributed",
    "--muon-scalar-optimizer adam",
    "--muon-fp32-matmul-prec medium",
    "--muon-fp32-matmul-prec medium --muon-ns-dtype bf16",
]
NOT_HERE = {
    "--muon-tp-mode blockwise --tensor-model-parallel-size 2": "--muon-tp-mode blockwise .*leave it out; a matrix is orthogonalized whole",
    "--muon-tp-mode blockwise --expert-tensor-parallel-size 2": "--muon-tp-mode blockwise has no meaning in megatron_muon: leave",
    "--muon-scalar-optimizer lion": "optimizer lion .*leave it out",
    "--muon-fp32-matmul-prec high": "prec high .*ns-dtype bf16, fp16",
    "--muon-fp32-matmul-prec medium --muon-ns-dtype fp32": "prec medium .*give --muon-ns-dtype",
    "--muon-fp32-matmul-prec medium --muon-preset fast": "prec medium .*give --muon-ns-dtype",
    "--muon-use-syrk": "--muon-use-syrk has no .*--muon-symmetric-products",
}


def has_flags_of(version: str, given: str) -> bool:
    return given.split()[0] in parser_of(version)._option_string_actions


@EVERY
@pytest.mark.parametrize("given", DONE_HERE)
def test_a_value_of_megatrons_that_asks_for_what_is_done_here_passes(
    version: str, given: str
) -> None:
    if not has_flags_of(version, given):
        with pytest.raises(SystemExit):  # it was removed: see left
            config_of(version, given)
        return
    settings = {"ns_dtype": "bf16"} if "bf16" in given else {}
    assert config_of(version, given) == MuonConfig(**settings)


@WITH_MUON
@pytest.mark.parametrize("given", NOT_HERE)
def test_a_value_of_megatrons_that_is_not_done_here_ends_with_what_to_give(
    version: str, given: str
) -> None:
    if has_flags_of(version, given):
        with pytest.raises(ValueError, match=NOT_HERE[given]):
            config_of(version, given)


@WITH_MUON
def test_dist_muon_is_refused_with_the_flags_of_megatrons_defaults(
    version: str,
) -> None:
    """As a user would copy them: Moonlight's scale would make the updates of such a run
    five times smaller.
    """
    with pytest.raises(ValueError) as refused:
        refuse_megatrons_names(parsed(version, "--optimizer dist_muon"))
    said = str(refused.value)
    flags = said.split("defaults of Megatron's own Muon ")[1].split("; --muon-backend")
    assert config_of(version, *flags[0].split()) == MuonConfig(
        matched_adamw_rms=1.0, momentum=0.9, nesterov=False, ns_coefficients="quintic"
    )
    assert "give --optimizer muon --use-distributed-optimizer, and for the" in said


@pytest.mark.parametrize(
    ("version", "name", "said"),
    [
        ("0.19", "adaptive_muon", "with --muon-rule normuon or namo .* own class"),
        # before Megatron had a Muon
        ("0.12", "dist_muon", "--use-distributed-optimizer; --muon-b"),
    ],
)
def test_a_name_of_megatrons_is_refused_for_muon(
    version: str, name: str, said: str
) -> None:
    args = parsed(version, "--optimizer", name)
    with pytest.raises(
        ValueError, match=f"^--optimizer {name}.*--optimizer muon {said}"
    ):
        refuse_megatrons_names(args)


@EVERY
def test_the_plugin_runs_muon_unless_it_is_told_otherwise(version: str) -> None:
    assert asks_for_muon(parsed(version, "--optimizer muon"))
    assert asks_for_muon(parsed(version, "--optimizer muon --muon-backend plugin"))


def test_megatrons_own_muon_needs_a_megatron_that_has_one() -> None:
    with pytest.raises(
        ValueError, match="--muon-backend upstream: this Megatron has no Muon"
    ):
        remove_flags(parsed("0.12", UPSTREAM))


@WITH_MUON
def test_megatrons_own_muon_takes_its_own_flags_and_no_other(version: str) -> None:
    for given in ("--muon-homes local", "--no-muon-nesterov"):
        args = parsed(version, UPSTREAM, given)
        assert not asks_for_muon(args)
        option = given.split()[0]
        with pytest.raises(ValueError, match=f"{option} is .*leave out --muon-backend"):
            remove_flags(args)
    for given in ("--muon-tp-mode blockwise", "--muon-cpu"):
        args = parsed(version, UPSTREAM, given)
        assert not asks_for_muon(args)
        remove_flags(args)
        assert args.muon_backend == "upstream"
