"""``--help`` of every command: without a Megatron, in a terminal of 80 columns and 60 lines."""

from __future__ import annotations

import pytest

from megatron_muon.lab.commands import BENCHES, COMMANDS, GONE, main
from support.processes import python

LINES = [[], *([name] for name in COMMANDS), *(["bench", name] for name in BENCHES)]
# without what only some environments have; prints each help, or what went wrong
CODE = """
import sys
for name in ("megatron", "pandas", "matplotlib", "tensorboard"):
    sys.modules[name] = None
from megatron_muon.lab.commands import main
for line in LINES:
    try:
        print(main([*line, "--help"]))
    except SystemExit as ended:
        print(ended.code)
    print("END")
"""


@pytest.fixture(scope="module")
def helps() -> list[str]:
    done = python("-c", CODE.replace("LINES", repr(LINES)), COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split("END\n")


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_help_needs_no_megatron_and_fits_a_terminal(line: list[str], helps: list[str]) -> None:
    *lines, status = helps[LINES.index(line)].splitlines()
    assert lines[0].startswith(" ".join(["usage: megatron-muon", *line])) and status == "0"
    assert len(lines) <= 60 and max(map(len, lines)) <= 80


def test_there_are_at_most_eight_commands() -> None:
    assert len(COMMANDS) <= 8


@pytest.mark.parametrize("name", GONE)
def test_what_is_gone_says_what_to_use(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "x"]) == 2
    assert capsys.readouterr().err == f"megatron-muon {name} is gone: {GONE[name]}\n"
