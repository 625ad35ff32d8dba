"""``megatron-muon bench`` as a command: what it prints, writes, refuses and returns."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_muon.lab.bench import peers
from megatron_muon.lab.bench.step.measure import Measured
from megatron_muon.lab.bench.step.meter import Times
from megatron_muon.lab.commands import main
from support.benching import OURS, SMALL, command

COLUMNS = """
name step_ms exchange_ms newton_schulz_ms sent_bytes ns_flops ns_flops_once state_bytes
peak_bytes rounds_ms newton_schulz_cpu_ms_per_gflop rounds_ungathered_ms exchange_rounds
"""


def test_json_has_the_schema(tmp_path: Path) -> None:
    """Of two ranks."""
    file = tmp_path / "steps.json"
    files = f"--json {file} --traces {tmp_path}"
    more = "--exchange none naive --parts"
    done = command(f"bench step --tp 1 --dp 2 {SMALL} --rounds 2 {more} {files}")
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    text = done.stdout + done.stderr
    for sign in ("importing torch", "starting 2 rank(s)", "building adamw"):
        assert sign in text
    assert report.keys() == {"topology", "run", "rows"}
    assert report["topology"] == {"tp": 1, "pp": 1, "dp": 2, "ep": 1, "cp": 1}
    names = [row["name"] for row in report["rows"]]
    # at TP 1
    assert set(names) >= {"adamw", *OURS} and "upstream-blockwise" not in names
    assert ("upstream-duplicated" in names) != (
        "upstream-duplicated: left out: " in text
    )
    for row in report["rows"]:
        assert list(row) == COLUMNS.split()
        step = row["step_ms"]
        assert step.keys() == {"median", "min", "max"}
        assert 0 < step["min"] <= step["median"] <= step["max"]
        assert step["median"] == statistics.median(row["rounds_ms"])
        assert (row["newton_schulz_cpu_ms_per_gflop"] is None) == (
            row["name"] == "adamw"
        )
        for whole, ungathered in zip(
            row["rounds_ms"], row["rounds_ungathered_ms"], strict=True
        ):
            assert 0 < ungathered < whole
        parts = row["exchange_ms"] + row["newton_schulz_ms"]
        assert (row["name"] == "adamw") == (parts == 0) and parts <= 2 * step["max"]
        for by_rank in (
            *row["sent_bytes"].values(),
            row["ns_flops"],
            row["state_bytes"],
        ):
            assert len(by_rank) == 2 and all(
                isinstance(number, int) for number in by_rank
            )
        assert all(0 < peak for peak in row["peak_bytes"])


def _run_with(
    weights: dict[str, int], monkeypatch: pytest.MonkeyPatch, arguments: str = ""
) -> int:
    """The command's exit status where rows end a step with these checksums."""

    def run_ranks(task: Any) -> list[list[Measured]]:
        times = [Times(2.0, {"params-all-gather": 1.0, "rest": 1.0}, 0.0)]
        rows = task.argument.rows
        return [[Measured(times, weights=weights.get(row.name, 7)) for row in rows]]

    monkeypatch.setattr("megatron_muon.lab.bench.step.command.run_ranks", run_ranks)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    names = " ".join(["adamw", *OURS, "muon-contiguous-auto", "muon-bucketed-auto"])
    command = f"bench step {SMALL} --tp 1 --dp 1 --rounds 1 --rows {names}"
    return main([*command.split(), *arguments.split()])


@pytest.mark.parametrize("other", ["muon-bucketed", "muon-bucketed-auto"])
def test_other_weights_are_exit_status_1_after_all_is_written(
    other: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Rows on auto are held to each other, not to those with the standard iteration."""
    autos = {"muon-contiguous-auto": 8, "muon-bucketed-auto": 8}
    assert _run_with(autos | {"adamw": 9}, monkeypatch) == 0
    assert "NOT the same" not in capsys.readouterr().out
    file = tmp_path / "x.json"
    assert _run_with(autos | {other: 9}, monkeypatch, f"--json {file}") == 1
    said = capsys.readouterr()
    assert f"{other}: NOT the same" in said.out
    # two signs of life, the error, and that upstream's row is left out
    assert len(said.err.splitlines()) <= 4
    assert "ended a step with different weights" in said.err
    assert len(json.loads(file.read_text())["rows"]) == 5


def test_the_bench_prints_times_and_flops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package whose iteration raises loses its row only."""

    def lacks(*_: Any) -> Tensor:
        raise ValueError("Invalid coefficient type: simple\nmore")

    monkeypatch.setitem(peers._PEERS, "emerging_optimizers", lambda *_: lacks)
    file = tmp_path / "speed.json"
    line = f"bench newton-schulz --rounds 2 --shapes 16x64 --json {file}".split()
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
    assert (
        batch["gram, at once"]["flops"]
        == batch["gram"]["flops"]
        == 3 * rows["gram"]["flops"]
    )
    assert "torch.optim.Muon, at once" not in batch  # it takes no batches
    assert "\nstandard, at once " in capsys.readouterr().out


@pytest.mark.usefixtures("newer_option")
def test_emergings_iteration_runs_in_bf16_after_torchs_newer_option_was_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asks torch's old option, which cannot be read where a new one contradicts
    it.
    """
    module = SimpleNamespace(
        newton_schulz=lambda *_: torch.get_float32_matmul_precision()
    )
    name = "emerging_optimizers.orthogonalized_optimizers.muon_utils"
    monkeypatch.setitem(sys.modules, name, module)
    every: Any = dict(peers.peers(5, torch.device("cpu"), torch.float32))
    assert every["emerging_optimizers"](torch.ones(2, 2)) == "medium"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
