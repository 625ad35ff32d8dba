"""``megatron-muon curves``: text, JSON, picture and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_muon.lab.commands import main


def run_of(tmp_path: Path, name: str, scale: float, steps: int = 200) -> str:
    """A quickstart's JSON whose losses are 1 + (t / scale)^-0.5."""
    train = [[t, 1 + (t / scale) ** -0.5] for t in range(1, steps + 1)]
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"curve": {"train": train, "validation": train[9::10]}}))
    return str(path)


def test_a_run_that_needs_half_the_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adamw = ",".join(run_of(tmp_path, f"adamw{seed}", 2.0) for seed in range(3))
    muon = ",".join(run_of(tmp_path, f"muon{seed}", 1.0) for seed in range(3))
    out, picture = tmp_path / "out.json", tmp_path / "curves.png"
    files = ["--json", str(out), "--plot", str(picture)]
    assert main(["curves", f"AdamW={adamw}", f"Muon={muon}", *files]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    (row,) = [
        line
        for line in text.split("validation loss")[1].splitlines()
        if "1.1000 (" in line
    ]
    assert row.split() == [
        "AdamW",
        "3",
        "200",
        "1.1000",
        "(1.1000",
        "to",
        "1.1000)",
        "0",
    ]
    assert "never" in text
    report = json.loads(out.read_text())
    assert set(report) == {"train", "validation"}
    (beside,) = report["validation"]["beside_first"]
    assert beside["name"] == "Muon"
    last = beside["leads"][-1]
    assert last["step"] == 200 and last["reached"] == pytest.approx([100.0] * 9)
    assert last["ratio"] == pytest.approx(1.0)


def test_runs_without_a_common_loss_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"step": 1, "lm loss": 2.0}\n')
    (tmp_path / "b.jsonl").write_text(
        '{"step": 1, "eval/loss": 2.0, "\\u001b[31m": 1}\n'
    )
    assert main(["curves", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 1
    error = capsys.readouterr().err
    assert "no kind of loss is in all files (a: train; b: validation)" in error
    assert main(["curves", str(tmp_path / "a.jsonl"), str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(
        [
            "curves",
            "--tag",
            "train=x",
            *[str(tmp_path / f"{name}.jsonl") for name in "ba"],
        ]
    )
    error = capsys.readouterr().err
    assert "it has no 'x', but 'eval/loss'" in error and "\x1b" not in error
