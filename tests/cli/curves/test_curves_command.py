"""``megatron-muon curves``: text, JSON, picture and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_muon.lab.commands import main


def line(step: int, loss: float) -> str:
    """A line of Megatron's log."""
    return f" iteration {step}/ 200 | learning rate: 1.0 | lm loss: {loss:.6E} | x: 1 |"


def validated(step: int, loss: float) -> str:
    return f" validation loss at iteration {step} | lm loss value: {loss:.6E} |"


def run_of(tmp_path: Path, name: str, scale: float) -> str:
    """A log of Megatron's whose losses are 1 + (t / scale)^-0.5."""
    losses = {t: 1 + (t / scale) ** -0.5 for t in range(1, 201)}
    lines = [line(*point) for point in losses.items()]
    lines += [validated(t, loss) for t, loss in losses.items() if t % 10 == 0]
    path = tmp_path / f"{name}.log"
    path.write_text("\n".join(lines))
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
    assert row.split() == "AdamW 3 200 1.1000 (1.1000 to 1.1000) 0".split()
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
    bad = "\x1b[31m"
    (tmp_path / "a.log").write_text(line(1, 2.0).replace("lm loss", f"{bad}lm loss"))
    (tmp_path / "b.log").write_text(validated(1, 2.0))
    logs = [str(tmp_path / name) for name in ("a.log", "b.log")]
    assert main(["curves", *logs]) == 1
    error = capsys.readouterr().err
    assert "no kind of loss is in all files (a: train; b: validation)" in error
    assert main(["curves", logs[0], str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["curves", "--tag", "train=x", *logs])
    error = capsys.readouterr().err
    assert "it has no 'x', but '" in error and "\x1b" not in error
