"""Every numeric flag of every command: a value that it cannot have is an error that says so."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import pytest

from megatron_muon.lab.bench.step.flags import command_parser
from megatron_muon.lab.commands import main
from megatron_muon.lab.routes.model_flags import CommandLine
from support.benching import SMALL
from support.models.model_flags import TINY

BAD = ["", "x", "nan", "inf", "-inf", "-1", "1e400", "9" * 40, "1,2"]
# By command: what the rest of its line is.
LINES: dict[str, list[str]] = {
    "routes": ["routes", *TINY],
    "step": ["bench", "step", *SMALL.split(), "--rounds", "1"],
}
SIGNED = {"--hidden-dropout", "--attention-dropout"}
# Where 0 is "none".
ZERO = {
    *("--num-experts", "--mtp-num-layers", "--moe-shared-expert-intermediate-size"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    "--muon-momentum",
}


def parser_of(command: str) -> argparse.ArgumentParser:
    """Of a command, as far as it makes its parser by itself."""
    if command == "step":
        return command_parser("bench step")
    module = importlib.import_module("megatron_muon.lab.routes.command")
    made = module._parser()
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
CASES += [("newton-schulz", "--rounds"), ("newton-schulz", "--batch"), ("speeds", "--ranks")]
LINES |= {name: ["bench", name] for name in ("newton-schulz", "speeds")}


def test_there_are_numeric_flags_to_look_at() -> None:
    counts = {command: sum(c == command for c, _ in CASES) for command in LINES}
    assert counts["routes"] > 50 and counts["step"] > 40


@pytest.mark.parametrize(("command", "flag"), CASES)
def test_a_value_that_cannot_be_is_an_error_that_names_the_flag(
    command: str,
    flag: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_muon.lab.ranks._context", _never)
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


def test_muons_flags_of_a_run_are_read_by_routes(capsys: pytest.CaptureFixture[str]) -> None:
    """None is named as not read: each is checked as a run checks it."""
    from megatron_muon.settings.run_flags import FLAGS

    harmless = {"--muon-momentum": "0.9", "--muon-round-mib": "8", "--muon-ns-batch": "4"}
    words = [word for pair in harmless.items() for word in pair]
    assert main(["routes", *TINY, *words, "--muon-nesterov", "--weight-decay-all-params"]) == 0
    assert "not read" not in capsys.readouterr().err
    known = set(parser_of("routes")._option_string_actions)
    assert {flag.option for flag in FLAGS} <= known
