"""What a run or a command prints where stdout's encoding lacks some of its
characters.
"""

from __future__ import annotations

import argparse
import io
import sys

import pytest

from megatron_muon.console import first_names, say
from megatron_muon.lab.accept.report import in_few_digits
from megatron_muon.lab.interrupts import run_command
from megatron_muon.lab.progress import progress
from megatron_muon.lab.tables import digits
from megatron_muon.megatron_lm.flags.parser import add_flags
from megatron_muon.planning.describe import amount

TEXT = (
    "1.05 × the mean, имя, \udce9"  # a file's name may have bytes that are no character
)


def by_command() -> None:
    assert run_command(lambda: print(TEXT) or 0) == 0  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    "printing", [lambda: say(TEXT), by_command], ids=["run", "command"]
)
@pytest.mark.parametrize(
    "encoding, shown",
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


def test_a_list_of_names_prints_the_first_and_the_number_of_the_others() -> None:
    assert [first_names("abcde"[:n], 3) for n in (0, 3, 4)] == [
        "",
        "a, b, c",
        "a, b, c and 1 more",
    ]


@pytest.mark.parametrize(
    "number, shown",
    [
        (999, "999"),
        (999.6, "1 k"),
        (999_400, "999 k"),
        (999_500, "1 M"),
        (999_999_999, "1 G"),
        (999.5e12, "1,000 T"),
        (12_345e12, "12,345 T"),
    ],
)
def test_an_amount_at_the_start_has_no_exponent(number: float, shown: str) -> None:
    assert amount(number) == shown


def test_a_figure_of_the_lab_has_no_exponent() -> None:
    assert [digits(x) for x in (0.01234, 999.4, 999.5, 2250.4)] == [
        "0.0123",
        "999",
        "1000",
        "2250",
    ]
    assert [in_few_digits(x) for x in (0.5, 9999.4, 9999.6, 12345.6)] == [
        "0.5",
        "9999",
        "10000",
        "12346",
    ]


def test_progress_is_counted_where_tqdm_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(progress([7, 8], "stages")) == [7, 8]
    assert capsys.readouterr().err == "stages: 1/2\rstages: 2/2\n"
