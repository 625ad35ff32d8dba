"""examples/evidence: its report is what its scripts print of the figures in the clone."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from support import ROOT

EVIDENCE = ROOT / "examples" / "evidence"
QUICKSTART = ROOT / "examples" / "quickstart"
REPORT = (EVIDENCE / "README.md").read_text()
OWN = ("training", "reports", "convergence", "finetuning", "stress", "topologies", "sweep")
OWN += ("arguments", "corpus")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script by its name, as it imports the others."""
    for folder in (EVIDENCE, QUICKSTART):
        monkeypatch.syspath_prepend(str(folder))
    for name in OWN:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def imported(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield imported
    for name in OWN:
        sys.modules.pop(name, None)


def recorded(name: str) -> Any:
    return json.loads((EVIDENCE / "figures" / name).read_text())


def test_the_report_has_every_table_as_it_is_printed(script: Any) -> None:
    tables = script("reports").tables(recorded("tuning.json"), recorded("convergence.json"))
    for table in tables.split("\n\n"):
        assert table in REPORT
    assert script("finetuning").table(recorded("finetuning.json")) in REPORT
    stress = script("stress")
    assert stress.table(stress.recorded(EVIDENCE / "figures")) in REPORT


def test_the_readme_has_the_ratio_of_both_tuned() -> None:
    ((ratio, spread),) = re.findall(r"^\| as tuned \|.*\| (\S+) \((.*)\) \|$", REPORT, re.MULTILINE)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"a leading ratio of {ratio} ({spread} over seeds)" in readme


def test_the_report_has_the_tables_over_topologies_as_they_are_printed(script: Any) -> None:
    for name, table in (("compare", "table"), ("memory", "peaks")):
        figures = recorded(f"{name}.json")
        assert getattr(script("topologies"), table)(figures) in REPORT
        assert f"python compare.py {' '.join(figures['run']['arguments'])}\n" in REPORT


def test_the_figures_are_those_of_the_scripts_settings(script: Any) -> None:
    convergence = script("convergence")
    tuning, questions = recorded("tuning.json"), recorded("convergence.json")
    tried = {name: {key: list(values) for key, values in grid.items()}
             for name, grid in convergence.TUNED.items()}  # fmt: skip
    assert tuning["tried"] == tried
    for name, question in questions.items():
        asked = convergence.QUESTIONS[name]
        assert (question["flags"], question["seeds"]) == (asked.flags, list(asked.seeds))
        assert question.get("matrices", "") == asked.matrices
        for optimizer in ("adam", "muon"):
            rate = tuning[optimizer]["found"]["--lr"]
            rates = {f"{round(rate * factor, 6):g}" for factor in getattr(asked, optimizer)}
            assert set(question[optimizer]["tried"]) == rates
            assert len(question[optimizer]["runs"]) == len(asked.seeds)
    texts = {
        run["corpus"] for q in questions.values() for o in ("adam", "muon") for run in q[o]["runs"]
    }
    assert len(texts) == 1


def test_adamw_is_tuned_at_least_as_hard_and_no_rate_is_at_the_edge_of_its_grid(
    script: Any,
) -> None:
    grids, tuning = script("convergence").TUNED, recorded("tuning.json")
    values = {name: sum(map(len, grid.values())) for name, grid in grids.items()}
    assert values["adam"] >= values["muon"]
    assert "--lr" not in tuning["adam"]["at_edge"] + tuning["muon"]["at_edge"]
