"""Every numeric flag of every command: a value that it cannot have is an error that says so."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import pytest

from megatron_muon.lab.commands import main
from megatron_muon.lab.routes.model_flags import CommandLine
from support.benching import SMALL
from support.models.model_flags import TINY

BAD = ["", "x", "nan", "inf", "-inf", "-1", "1e400", "9" * 40, "1,2"]
# By command: what the rest of its line is.
LINES: dict[str, list[str]] = {
    "routes": ["routes", *TINY],
    "step": ["bench", "step", *SMALL.split(), "--rounds", "1"],
    "newton-schulz": ["bench", "newton-schulz"],
    "speeds": ["bench", "speeds"],
}
SIGNED = {"--hidden-dropout", "--attention-dropout"}
# Where 0 is "none".
ZERO = {
    *("--num-experts", "--mtp-num-layers", "--moe-shared-expert-intermediate-size"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    "--muon-momentum",
}


def parser_of(command: str) -> argparse.ArgumentParser:
    modules = {
        "step": "bench.step.flags",
        "newton-schulz": "bench.newton_schulz.command",
        "speeds": "bench.speeds",
    }
    name = modules.get(command, f"{command}.command")
    module = importlib.import_module(f"megatron_muon.lab.{name}")
    made = (getattr(module, "command_parser", None) or module._parser)()
    if command == "routes":
        CommandLine(made, [])
    assert isinstance(made, argparse.ArgumentParser)
    return made


def numeric(command: str) -> list[str]:
    """The first name of each flag whose value is a number, by what its kind makes of "1"."""
    flags = []
    for action in parser_of(command)._actions:
        if action.option_strings and action.nargs != 0 and callable(action.type):
            try:
                value: Any = action.type("1")
            except Exception:
                continue
            if type(value) in (int, float):
                flags.append(action.option_strings[0])
    return flags


CASES = [(command, flag) for command in LINES for flag in numeric(command)]


def test_there_are_numeric_flags_to_look_at() -> None:
    counts = {command: sum(c == command for c, _ in CASES) for command in LINES}
    assert counts["routes"] > 50 and counts["step"] > 12 and min(counts.values()) >= 2


@pytest.mark.parametrize(("command", "flag"), CASES)
def test_a_value_that_cannot_be_is_an_error_that_names_the_flag(
    command: str,
    flag: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_muon.lab.bench.ranks.run_ranks", _never)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    bad = list(BAD)
    if flag in SIGNED:
        bad.remove("-1")
    if flag in SIGNED or "muon" in flag or flag == "--factor":
        bad.remove("9" * 40)  # large, but a number
    default = command == "routes" and flag in ("--muon-round-mib", "--muon-ns-batch")  # 0 is there
    if flag not in SIGNED | ZERO and not default:
        bad.append("0")
    for value in bad:
        with pytest.raises(SystemExit) as ended:
            main([*LINES[command], f"{flag}={value}"])
        said = capsys.readouterr()
        assert ended.value.code == 2, (value, said.err)
        assert "Traceback" not in said.err
        last = said.err.strip().split("\n")[-1]
        setting = flag.removeprefix("--muon-").replace("-", "_")
        assert flag in last or setting in last or _SETTING.get(flag, flag) in last, (value, last)


def _never(task: Any) -> Any:
    raise AssertionError("ranks are started for arguments that are wrong")


# Settings of MuonConfig by the flag that says them under another name.
_SETTING = {
    "--muon-extra-scale-factor": "matched_adamw_rms",
    "--muon-num-ns-steps": "ns_steps",
    "--muon-round-mib": "round_bytes",
}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["routes", *TINY, "--world-size", "0"],
            "--world-size: must be a whole number of at least",
        ),
        (
            ["routes", *TINY, "--muon-ns-coefficients", "1,2"],
            "coefficients are a name or a,b,c;a,b,c;..., got '1,2'",
        ),
        (
            ["bench", "speeds", "--muon-ns-coefficients", "1,2"],
            "coefficients are a name or a,b,c;a,b,c;..., got '1,2'",
        ),
        (
            ["routes", *TINY, "--muon-momentum", "1.5"],
            "momentum (--muon-momentum) must be in [0, 1), got 1.5",
        ),
        (["routes", *TINY, "--muon-tp-mode", "x"], "argument --muon-tp-mode: invalid choice: 'x'"),
        (["routes", *TINY, "--muon-backend", "upstream"], "--muon-backend upstream is not supp"),
        (["routes", *TINY, "--muon-use-syrk"], "--muon-use-syrk has no meaning in megatron_muon"),
        (["bench", "step", "--dp", "2000"], "--dp: must be a whole number of at most 1024"),
        (["bench", "step", "--dp", "512", "--tp", "8"], "are 4096 ranks, at most 1024 here"),
        (["bench", "newton-schulz", "--shapes", "0x8"], "a shape is ROWSxCOLS, got '0x8'"),
    ],
)
def test_what_is_wanted_is_said(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_muon.lab.bench.ranks.run_ranks", _never)
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and said in capsys.readouterr().err.strip().split("\n")[-1]


def test_muons_flags_of_a_run_are_read_by_routes(capsys: pytest.CaptureFixture[str]) -> None:
    """None is named as not read: each is checked as a run checks it."""
    from megatron_muon.settings.run_flags import FLAGS

    harmless = {"--muon-momentum": "0.9", "--muon-round-mib": "8", "--muon-ns-batch": "4"}
    words = [word for pair in harmless.items() for word in pair]
    assert main(["routes", *TINY, *words, "--muon-nesterov", "--weight-decay-all-params"]) == 0
    assert "not read" not in capsys.readouterr().err
    known = set(parser_of("routes")._option_string_actions)
    assert {flag.option for flag in FLAGS} <= known
