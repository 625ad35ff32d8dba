"""``megatron-muon bench newton-schulz``: what it prints is what was run, errors come before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.lab.bench import peers
from megatron_muon.lab.commands import main

CPU = torch.device("cpu")


def test_the_bench_prints_times_and_flops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package whose iteration raises loses its row only."""

    def lacks(*_: Any) -> torch.Tensor:
        raise ValueError("Invalid coefficient type: simple\nmore")

    monkeypatch.setitem(peers._PEERS, "emerging_optimizers", lambda *_: lacks)
    file = tmp_path / "speed.json"
    line = ["bench", "newton-schulz", "--rounds", "2", "--shapes", "16x64", "--json", str(file)]
    assert main(line) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert {"standard", "gram", "auto", "torch.optim.Muon"} <= set(rows)
    assert "emerging_optimizers" not in rows
    assert rows["gram"]["flops"] < rows["standard"]["flops"]
    said = capsys.readouterr().out
    assert "emerging_optimizers has no row: Invalid coefficient type: simple\n" in said
    assert "\n16x64\nrow " in said and "symmetric products: torch, in panels" in said
    assert "Gflop/s  of ceiling\nstandard " in said
    top = rows[json.loads(file.read_text())["ceiling"]]
    assert (top["flops"], top["ratio"], top["of_ceiling"]) == (2 * 1024**3, None, 1.0)
    assert 0 < rows["standard"]["of_ceiling"] < 1  # far too small to be at it
    assert rows["torch.optim.Muon"]["of_ceiling"] is None  # its flops are its own
    assert main([*line, "--batch", "3"]) == 0
    batch = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert batch["gram, at once"]["flops"] == batch["gram"]["flops"] == 3 * rows["gram"]["flops"]
    assert "torch.optim.Muon, at once" not in batch  # it takes no batches
    assert "\nstandard, at once " in capsys.readouterr().out
