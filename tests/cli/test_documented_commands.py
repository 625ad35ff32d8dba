"""Commands of the documents that no test of their own runs."""

from __future__ import annotations

import shlex

import pytest

from megatron_muon.lab.commands import main
from support import documents

tomllib = pytest.importorskip("tomllib", reason="the standard library has it from Python 3.11 on")

HERE = "test_documented_commands.py::test_a_command_of_the_documents_runs"
TABLE = tomllib.loads(documents.TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", TABLE["run"][HERE])
def test_a_command_of_the_documents_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(command)
    assert program == "megatron-muon"
    assert main(arguments) == 0
    assert capsys.readouterr().out
