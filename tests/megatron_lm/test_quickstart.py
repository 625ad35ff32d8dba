"""examples/quickstart: what is recorded in figures/ is what its scripts run and its pages say."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest

from support import ROOT

QUICKSTART = ROOT / "examples" / "quickstart"
PAGE = (QUICKSTART / "README.md").read_text()


@pytest.fixture(autouse=True)
def _scripts_import_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(QUICKSTART))


def script(name: str) -> ModuleType:
    """A script of the quickstart as a module; none of these two imports Megatron."""
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", QUICKSTART / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def recorded(name: str) -> dict:
    return json.loads((QUICKSTART / "figures" / name).read_text())


def test_transfer_json_has_every_run_of_the_settings() -> None:
    settings = script("sweep").SETTINGS
    report = recorded("transfer.json")["settings"]
    assert list(report) == list(settings)
    for name, setting in settings.items():
        assert report[name]["flags"] == setting.flags
        for optimizer in ("adam", "muon"):
            runs = [run for run in report[name]["runs"] if run["optimizer"] == optimizer]
            assert [run["lr"] for run in runs] == list(getattr(setting, optimizer))
            assert all(run["val_loss"] is not None for run in runs)


def test_the_page_has_the_table_of_rates_as_it_was_printed() -> None:
    assert script("sweep").transfer_table(recorded("transfer.json")) in PAGE


def test_the_page_on_qk_clip_has_the_table_as_it_was_printed() -> None:
    clip, report = script("clip"), recorded("clip.json")
    assert clip.table(report) in (ROOT / "docs" / "qk_clip.md").read_text()
    free, clipped, usual = report["runs"].values()
    assert [run["flags"] for run in (free, clipped, usual)] == [
        ["--lr", f"{rate:g}", *flags] for rate, flags in clip.RUNS.values()
    ]
    assert all(max(logits) > 7 * clip.THRESHOLD for logits in free["logits"])
    assert all(max(logits) < 1.4 * clip.THRESHOLD for logits in clipped["logits"])


def test_the_page_has_the_table_of_splits_as_it_was_printed() -> None:
    splits, report = script("splits"), recorded("splits.json")
    assert splits.table(report) in PAGE
    assert report["rates"] == list(splits.RATES) and report["steps"] == splits.STEPS
    for model, rows in splits.MODELS.items():
        for name, patterns in rows.items():
            row = report["models"][model][name]
            assert row["splits"] == list(patterns)
            assert row["lr"] != splits.RATES[-1]  # the best rate is inside of the grid
            assert {len(losses) for losses in row["val_losses"].values()} == {len(splits.SEEDS)}


def test_the_page_has_the_table_of_clips_as_it_was_printed() -> None:
    clips, report = script("clip_scope"), recorded("clip_scope.json")
    assert clips.table(report) in PAGE
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
