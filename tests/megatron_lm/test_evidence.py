"""examples/evidence and quickstart: pages have what their scripts print of the clone's
figures.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from support import ROOT

EVIDENCE = ROOT / "examples" / "evidence"
QUICKSTART = ROOT / "examples" / "quickstart"
FOLDERS = EVIDENCE, QUICKSTART
REPORT = (EVIDENCE / "README.md").read_text()
PAGE = (QUICKSTART / "README.md").read_text()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a script by its name, as it imports the others."""
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    names = [path.stem for folder in FOLDERS for path in folder.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def recorded(name: str) -> Any:
    """The figures of a script of either folder."""
    (file,) = (f for folder in FOLDERS for f in folder.glob(f"figures/{name}"))
    return json.loads(file.read_text())


# Script, its function, the figures that it prints, and the page that has this table.
TABLES = [
    *(
        (name.removesuffix("_larger"), "table", f"{name}.json", REPORT)
        for name in ("finetuning", "rules", "rules_larger", "mup", "policy_gradient")
    ),
    ("topologies", "table", "compare.json", REPORT),
    ("topologies", "peaks", "memory.json", REPORT),
    ("sweep", "transfer_table", "transfer.json", PAGE),
    ("clip", "table", "clip.json", (ROOT / "docs" / "qk_clip.md").read_text()),
    ("splits", "table", "splits.json", PAGE),
    ("clip_scope", "table", "clip_scope.json", PAGE),
]


@pytest.mark.parametrize(
    "name, function, figures, page", TABLES, ids=lambda each: each[:30]
)
def test_a_page_has_a_table_as_it_is_printed(
    name: str, function: str, figures: str, page: str, script: Any
) -> None:
    assert getattr(script(name), function)(recorded(figures)) in page


def test_the_report_has_the_tables_of_several_files(script: Any) -> None:
    tables = script("reports").tables(
        recorded("tuning.json"), recorded("convergence.json")
    )
    for table in tables.split("\n\n"):
        assert table in REPORT
    page = (ROOT / "docs" / "finetuning.md").read_text()
    report = recorded("finetuning.json")
    assert script("finetuning").rates_table(report, "adam") in page
    stress = script("stress")
    assert stress.table(stress.recorded(EVIDENCE / "figures")) in REPORT


def test_the_readme_has_the_ratios_of_both_tuned(script: Any) -> None:
    larger = script("rules").table(recorded("rules_larger.json"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    for text, row in ((REPORT, "as tuned"), (larger, "Muon")):
        ((ratio, spread),) = re.findall(
            rf"^\| {row} \|.*\| (\S+) \((.*)\) \|$", text, re.MULTILINE
        )
        assert f"a leading ratio of {ratio} ({spread} over seeds)" in readme


def test_the_report_has_the_commands_over_topologies() -> None:
    for name in ("compare", "memory"):
        arguments = recorded(f"{name}.json")["run"]["arguments"]
        assert f"python compare.py {' '.join(arguments)}\n" in REPORT


def test_the_figures_are_those_of_the_scripts_settings(script: Any) -> None:
    convergence = script("convergence")
    tuning = recorded("tuning.json")
    questions = recorded("convergence.json")
    tried = {name: {key: list(values) for key, values in grid.items()}
             for name, grid in convergence.TUNED.items()}  # fmt: skip
    assert tuning["tried"] == tried
    texts: set[str] = set()
    for name, question in questions.items():
        asked = convergence.QUESTIONS[name]
        assert (question["flags"], question["seeds"]) == (
            asked.flags,
            list(asked.seeds),
        )
        assert question.get("matrices", "") == asked.matrices
        for optimizer in ("adam", "muon"):
            rate = tuning[optimizer]["found"]["--lr"]
            rates = {
                f"{round(rate * factor, 6):g}" for factor in getattr(asked, optimizer)
            }
            assert set(question[optimizer]["tried"]) == rates
            assert len(question[optimizer]["runs"]) == len(asked.seeds)
            texts |= {run["corpus"] for run in question[optimizer]["runs"]}
    assert len(texts) == 1


def test_adamw_is_tuned_at_least_as_hard_and_no_rate_is_at_the_edge_of_its_grid(
    script: Any,
) -> None:
    grids = script("convergence").TUNED
    tuning = recorded("tuning.json")
    values = {name: sum(map(len, grid.values())) for name, grid in grids.items()}
    assert values["adam"] >= values["muon"]
    assert "--lr" not in tuning["adam"]["at_edge"] + tuning["muon"]["at_edge"]


# --- the quickstart -------------------------------------------------------------------


def test_transfer_json_has_every_run_of_the_settings(script: Any) -> None:
    settings = script("sweep").SETTINGS
    report = recorded("transfer.json")["settings"]
    assert list(report) == list(settings)
    for name, setting in settings.items():
        assert report[name]["flags"] == setting.flags
        for optimizer in ("adam", "muon"):
            runs = [
                run for run in report[name]["runs"] if run["optimizer"] == optimizer
            ]
            assert [run["lr"] for run in runs] == list(getattr(setting, optimizer))
            assert all(run["val_loss"] is not None for run in runs)


def test_the_runs_of_qk_clip_are_those_of_the_settings(script: Any) -> None:
    clip = script("clip")
    report = recorded("clip.json")
    free, clipped, usual = report["runs"].values()
    assert [run["flags"] for run in (free, clipped, usual)] == [
        ["--lr", f"{rate:g}", *flags] for rate, flags in clip.RUNS.values()
    ]
    assert all(max(logits) > 7 * clip.THRESHOLD for logits in free["logits"])
    assert all(max(logits) < 1.4 * clip.THRESHOLD for logits in clipped["logits"])


def test_the_runs_of_splits_are_those_of_the_settings(script: Any) -> None:
    splits = script("splits")
    report = recorded("splits.json")
    assert report["rates"] == list(splits.RATES) and report["steps"] == splits.STEPS
    for model, rows in splits.MODELS.items():
        for name, patterns in rows.items():
            row = report["models"][model][name]
            assert row["splits"] == list(patterns)
            assert row["lr"] != splits.RATES[-1]  # the best rate is inside of the grid
            assert {len(losses) for losses in row["val_losses"].values()} == {
                len(splits.SEEDS)
            }


def test_the_runs_of_clips_are_those_of_the_settings(script: Any) -> None:
    clips = script("clip_scope")
    report = recorded("clip_scope.json")
    assert (report["lr"], report["steps"]) == (clips.RATE, clips.STEPS)
    rows = [(row["clip"], row["scope"]) for row in report["rows"]]
    assert rows == [(clip, scope) for clip in clips.CLIPS for scope in clips.SCOPES]
    assert {len(row["val_losses"]) for row in report["rows"]} == {len(clips.SEEDS)}


def test_the_page_has_the_losses_of_the_picture() -> None:
    summary = recorded("summary.json")
    muon, adamw = (summary[name]["val_loss"] for name in ("muon", "adamw"))
    words = " ".join(PAGE.split())
    assert f"| **{muon:.3f}** | {adamw:.3f} |" in words
    assert f"a leading ratio (S − s)/s of {summary['leading_ratio']:.2f}" in words
    assert (QUICKSTART / "figures" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "(figures/loss.png)" in PAGE


# --- numbers in the text beside a picture ----------------------------------------------

PICTURES = [
    (page, picture)
    for page in (
        EVIDENCE / "README.md",
        QUICKSTART / "README.md",
        *ROOT.glob("docs/*.md"),
    )
    for picture in re.findall(r"^!\[.*\]\((.*)\)$", page.read_text(), re.MULTILINE)
]
NUMBER = r"(?<![\w.])\d+\.\d+"


@pytest.mark.parametrize("page, picture", PICTURES, ids=lambda each: Path(each).name)
def test_a_number_beside_a_picture_is_of_a_table_or_of_the_pictures_file(
    page: Path, picture: str, script: Any
) -> None:
    """The tables are printed from the files, which other tests here hold."""
    text = page.read_text()
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    beside = text.split(f"({picture})\n")[1].split("\n#")[0].split("\n![")[0]
    prose = [line for line in beside.splitlines() if not line.startswith("|")]
    numbers = set(re.findall(NUMBER, "\n".join(prose)))
    numbers -= set(re.findall(NUMBER, tables))
    claims = CLAIMS.get(Path(picture).name)
    assert numbers <= (claims(script) if claims else set())


def test_the_page_says_what_the_picture_of_resumes_shows(script: Any) -> None:
    report = recorded("resume.json")
    words = " ".join(PAGE.split())
    for sentence in script("resume").said(report["curves"], report["steps"]):
        assert sentence in words


def _of_resumes(script: Any) -> set[str]:
    report = recorded("resume.json")
    sentences = script("resume").said(report["curves"], report["steps"])
    return set(re.findall(NUMBER, " ".join(sentences)))


def _of_losses(script: Any) -> set[str]:
    """The quickstart's ratio, both tuned and untuned, and its losses over seeds."""
    summary = recorded("summary.json")
    seeds = recorded("seeds.json")
    (tuned,) = re.findall(r"^\| as tuned \|.*\| (\S+) \(.*\) \|$", REPORT, re.MULTILINE)
    losses = [seeds[name]["val_losses"] for name in ("muon", "adam")]
    spread = [f(each) for each in losses for f in (mean, min, max)]
    reached = summary["adamw"]["steps"] / (1 + summary["leading_ratio"])
    return {
        tuned,
        f"{summary['leading_ratio']:.2f}",
        f"{reached:.1f}",
        *(f"{each:.3f}" for each in spread),
    }


def _of_convergence(script: Any) -> set[str]:
    found = recorded("convergence.json")
    muon = {name: _mean_loss(question["muon"]) for name, question in found.items()}
    fused = muon["QKV fused, gate and up fused"]
    apart = [
        muon["decay on all parameters"] - muon["as tuned"],
        fused - muon["QKV split, gate and up split"],
    ]
    warmups = {
        trial["--lr-warmup-iters"]: trial["loss"]
        for trial in recorded("tuning.json")["adam"]["trials"]
        if trial["--lr"] == 0.003
        and (trial["--weight-decay"], trial["--adam-beta2"]) == (0.1, 0.95)
    }
    numbers = (*apart, warmups[10], warmups[100])
    return {f"{number:.3f}" for number in numbers}


def _of_finetuning(script: Any) -> set[str]:
    pairs = recorded("finetuning.json")["pairs"]
    loss = {name: _mean_loss(pair) for name, pair in pairs.items()}
    python = {
        name: mean(run["other"][-1][1] for run in pair["runs"])
        for name, pair in pairs.items()
    }
    return {
        f"{number:.2f}"
        for number in (
            loss["adam adam"] - loss["adam muon_0.5"],
            loss["muon adam"] - loss["muon muon_0.5"],
            python["adam muon_0.2"] - python["adam muon_0.5"],
        )
    }


def _mean_loss(part: Any) -> float:
    return mean(run["loss"] for run in part["runs"])


CLAIMS = {
    "resume.png": _of_resumes,
    "loss.png": _of_losses,
    "convergence.png": _of_convergence,
    "finetuning.png": _of_finetuning,
}
