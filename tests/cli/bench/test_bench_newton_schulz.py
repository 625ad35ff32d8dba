"""``megatron-muon bench newton-schulz``: what it prints is what was run, errors come before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_muon.lab.bench.newton_schulz import command, peers
from megatron_muon.lab.bench.newton_schulz.ceiling import ceiling_on
from megatron_muon.lab.commands import main
from megatron_muon.orthogonalize.matmul import numerics_on, plan_device, products_on
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.settings.coefficients import SETS, NsDtype
from megatron_muon.settings.config import MuonConfig

PAIRS = [(name, steps) for name, coefficients in SETS.items() for steps in coefficients.restarts]
DTYPES = get_args(NsDtype)
CPU_DEVICE = torch.device("cpu")
CPU = plan_device(CPU_DEVICE)


def test_the_bench_prints_times_and_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "speed.json"
    line = ["bench", "newton-schulz", "--rounds", "2", "--shapes", "16x64", "--json", str(file)]
    assert main(line) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert {"standard", "gram", "auto", "torch.optim.Muon"} <= set(rows)
    assert rows["gram"]["flops"] < rows["standard"]["flops"]
    said = capsys.readouterr().out
    assert "| 16x64 | standard | " in said and "symmetric products: torch, in panels" in said
    assert "| Gflop/s | of ceiling |" in said
    top = rows[json.loads(file.read_text())["ceiling"]]
    assert (top["flops"], top["ratio"], top["of_ceiling"]) == (2 * 1024**3, None, 1.0)
    assert 0 < rows["standard"]["of_ceiling"] < 1  # far too small to be at it
    assert rows["torch.optim.Muon"]["of_ceiling"] is None  # its flops are its own
    assert main([*line, "--batch", "3"]) == 0
    batch = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert batch["gram, at once"]["flops"] == batch["gram"]["flops"] == 3 * rows["gram"]["flops"]
    assert "torch.optim.Muon, at once" not in batch  # it takes no batches
    assert "| 16x64 | standard, at once | " in capsys.readouterr().out
    accuracy = ["bench", "newton-schulz", "--accuracy", "--shapes", "8x24"]
    assert main([*accuracy, "--coefficients", "cans", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "cans, bf16, gram: refused: " in said and "NOT FINITE" not in said
    measured = [row for row in json.loads(file.read_text())["rows"] if isinstance(row, dict)]
    assert {row["dtype"] for row in measured} == set(DTYPES)
    assert {row["shape"] for row in measured} == {"8x24"}
    assert {"condition 1e+08", "entries at 1e-30", "entries at 1e30", "rank 1"} <= {
        row["input"] for row in measured
    }


def test_of_ceiling_is_the_median_of_the_rounds_rates() -> None:
    times = {"standard": [2.0, 4.0, 8.0], "gram": [1.0, 4.0, 2.0], "matmul": [3.0, 1.0, 2.0]}
    flops: dict[str, int | None] = {"standard": 100, "gram": None, "matmul": 200}
    standard, gram, matmul = command._rows(times, flops, "matmul")
    # 100 / 2 of 200 / 3, 100 / 4 of 200 / 1, 100 / 8 of 200 / 2
    assert standard["of_ceiling"] == pytest.approx(1 / 8) and gram["of_ceiling"] is None
    assert (standard["ratio"], gram["ratio"], matmul["ratio"]) == (1.0, 2.0, None)
    assert matmul["of_ceiling"] == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ceiling_is_in_what_products_are_made_in(dtype: Any) -> None:
    ceiling = ceiling_on(CPU_DEVICE, dtype)
    assert (
        ceiling.left.dtype
        == products_on(CPU_DEVICE, numerics_on(CPU_DEVICE, MuonConfig(ns_dtype=dtype))).held
    )
    with FlopCounterMode(display=False) as counter:
        assert ceiling(torch.zeros(1)).shape == (1024, 1024)
    assert counter.get_total_flops() == ceiling.flops
    assert ceiling.name == f"matmul 1024x1024, {Numerics(MuonConfig(ns_dtype=dtype), CPU).held}"


def test_accuracy_is_of_the_dtype_and_of_every_shape_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "errors.json"
    line = "bench newton-schulz --accuracy --coefficients aol --dtype fp16 --shapes 8x24 40x10"
    assert main([*line.split(), "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert {(row["dtype"], row["shape"]) for row in report["rows"]} == {
        ("fp16", "8x24"),
        ("fp16", "10x40"),
    }
    assert "| aol | 4 | fp16 | gram | 10x40 | rank 1 | " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--rounds 0", "argument --rounds: must be a whole number of at least 1, got '0'"),
        ("--steps 0", "argument --steps: must be a whole number of at least 1, got '0'"),
        ("--batch -1", "argument --batch: must be a whole number of at least 1, got '-1'"),
        (
            "--steps 7 --coefficients cubic5",
            "'cubic5' are for 5 steps, and ns_steps (--muon-ns-steps) is 7",
        ),
        ("--accuracy --steps 7 --coefficients cubic5", "'cubic5' are for 5 steps"),
        ("--find-restarts", "cd tests && python -m figures.restart_errors --find"),
        ("--accuracy --coefficients 1,2,3", "--coefficients 1,2,3: one of simple, "),
        ("--accuracy --batch 2", "--batch has no meaning with --accuracy"),
        ("--accuracy --rounds 2", "--rounds has no meaning with --accuracy"),
        ("--device cuda:99", "--device cuda:99: torch sees "),
        ("--device meta", "--device meta: cpu, cuda or cuda:N"),
        ("--device nowhere", "--device nowhere: cpu, cuda or cuda:N"),
        ("--json /no/such/folder/x", "--json /no/such/folder/x: there is no folder /no/such"),
        ("--json .", "--json . is a folder"),
    ],
)
def test_wrong_arguments_are_one_line_before_any_work(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "newton-schulz", *arguments.split()])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: " in err.splitlines()[-1] and said in err.splitlines()[-1]


def test_cuda_is_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "newton-schulz", "--device", "cuda"])
    assert "--device cuda: torch sees no GPU here\n" in capsys.readouterr().err


def test_a_peer_that_lacks_the_set_loses_its_row_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As emerging_optimizers v0.1.0 without cubic5: it says so once it is called."""

    def lacks(*_: Any) -> torch.Tensor:
        raise ValueError("Invalid coefficient type: cubic5\nmore")

    monkeypatch.setitem(peers._PEERS, "emerging_optimizers", lambda *_: lacks)
    file = tmp_path / "speed.json"
    line = "bench newton-schulz --rounds 1 --shapes 16x64 --coefficients cubic5 --json"
    assert main([*line.split(), str(file)]) == 0
    said = capsys.readouterr().out
    assert "emerging_optimizers has no row: Invalid coefficient type: cubic5\n" in said
    names = {row["name"] for row in json.loads(file.read_text())["rows"]}
    assert {"standard", "gram", "torch.optim.Muon"} <= names
    assert "emerging_optimizers" not in names
