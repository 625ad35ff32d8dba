"""What a run or a command prints where stdout's encoding lacks some of its characters."""

from __future__ import annotations

import argparse
import io
import sys

import pytest

from megatron_muon.console import first_names, say
from megatron_muon.lab.interrupts import run_command
from megatron_muon.megatron_lm.flags.parser import add_flags

TEXT = "1.05 × the mean, имя, \udce9"  # a file's name may have bytes that are no character


def by_command() -> None:
    assert run_command(lambda: print(TEXT) or 0) == 0  # type: ignore[func-returns-value]


@pytest.mark.parametrize("printing", [lambda: say(TEXT), by_command], ids=["run", "command"])
@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", r"1.05 \xd7 the mean, \u0438\u043c\u044f, \udce9"),
        ("latin-1", r"1.05 × the mean, \u0438\u043c\u044f, \udce9"),
        ("utf-8", r"1.05 × the mean, имя, \udce9"),
    ],
)
def test_a_character_that_the_encoding_lacks_is_escaped(
    printing: object, encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding))
    printing()  # type: ignore[operator]
    sys.stdout.flush()
    assert out.getvalue().decode(encoding) == f"{shown}\n"


def test_the_help_of_a_script_that_megatron_prints_has_ascii_alone() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert parser.format_help().isascii()


def test_of_many_names_the_first_are_said_and_how_many_more_there_are() -> None:
    assert [first_names("abcde"[:n], 3) for n in (0, 3, 4)] == ["", "a, b, c", "a, b, c and 1 more"]
