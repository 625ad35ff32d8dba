"""Every numeric flag of every command refuses what is no number that it can have.

Argparse names the flag then. Muon's own flags are refused by their rows, as in a run: see
``test_rows.py``.
"""

from __future__ import annotations

import argparse
import importlib

import pytest

from megatron_muon.lab.bench.step.flags import command_parser
from megatron_muon.lab.commands import main
from megatron_muon.lab.routes.model_flags import CommandLine
from megatron_muon.settings.run_flags import FLAGS
from support.models.model_flags import TINY

BAD = ["", "x", "nan", "inf", "-inf", "1e400", "1,2"]
SIGNED = {"--hidden-dropout", "--attention-dropout"}
UNSIGNED = ["-1", "9" * 40]


def parser_of(command: str) -> argparse.ArgumentParser:
    """Of a command, as far as it makes its parser by itself."""
    if command == "step":
        return command_parser("bench step")
    made = importlib.import_module("megatron_muon.lab.routes.command")._parser()
    CommandLine(made, [])
    assert isinstance(made, argparse.ArgumentParser)
    return made


@pytest.mark.parametrize("command", ["routes", "step"])
def test_a_value_that_cannot_be_is_refused_as_it_is_read(command: str) -> None:
    checked = 0
    for action in parser_of(command)._actions:
        flag = action.option_strings[:1]
        if action.nargs == 0 or not callable(action.type) or {*flag} & {f.option for f in FLAGS}:
            continue
        try:
            is_number = type(action.type("1")) in (int, float)
        except Exception:
            continue
        for value in [*BAD, *UNSIGNED] if is_number and not {*flag} & SIGNED else BAD * is_number:
            with pytest.raises((argparse.ArgumentTypeError, ValueError)):
                print(flag, action.type(value))
        checked += is_number
    assert checked > 30


def test_muons_flags_of_a_run_are_read_by_routes(capsys: pytest.CaptureFixture[str]) -> None:
    """None is named as not read: each is checked as a run checks it."""
    harmless = {"--muon-momentum": "0.9", "--muon-round-mib": "8", "--muon-ns-batch": "4"}
    words = [word for pair in harmless.items() for word in pair]
    assert main(["routes", *TINY, *words, "--muon-nesterov", "--weight-decay-all-params"]) == 0
    assert "not read" not in capsys.readouterr().err
    known = set(parser_of("routes")._option_string_actions)
    assert {flag.option for flag in FLAGS} <= known
