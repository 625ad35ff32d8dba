"""docs/published_figures.md has the figures that its own commands print."""

from __future__ import annotations

import re
import shlex

import pytest

from megatron_muon.lab.commands import main
from support.documents import ROOT, commands

LINES = commands((ROOT / "docs" / "published_figures.md").read_text())
GPT, SLOW = (line.split('"')[1] for line in LINES if line.startswith(("GPT=", "SLOW=")))
# What each command prints of the page; a plan by its rows, a sweep by its steps.
FIGURES = [
    [
        r"parameters +- +6 ",
        r"run\).* 0\.19%",
        r"momentum, MiB +0 +1,825 ",
        r"moments, MiB +7,658 +4,008 ",
    ],
    [r"parameters +- +45 +128 "],
    "29.6 30.5 28.6 28.1".split(),
    ["631.1 MB a rank", "184.1 / 210.1"],
    ["1,884.7 MB a rank", "44.2 / 85.1"],
    ["25.4", "35.6", "37.4", "44.2", r"\+22.17%", r"\+33.06%"],
    ["35.6", "67.4", "42.2"],
]


@pytest.mark.parametrize("number", range(len(FIGURES)))
def test_the_page_has_what_its_commands_print(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [line for line in LINES if line.startswith("megatron-muon plan")]
    assert len(plans) == len(FIGURES)
    line = plans[number].replace("$SLOW", SLOW).replace("$GPT", GPT)
    assert main(shlex.split(line)[1:]) == 0
    printed = capsys.readouterr().out
    for figure in FIGURES[number]:
        assert re.search(figure, printed), printed
