"""``megatron-muon trace``: the report of a real pair of runs, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_muon.lab.commands import main
from support.traces import PAIR, event, mark, write

STEP = mark("ProfilerStep#1", 0, 1000)


def _reported(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["trace", "report", *words]) == 0
    return capsys.readouterr().out


def test_a_report_of_a_real_pair_tells_our_exchange_from_megatrons_reduction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    files = "--json", str(out)
    text = _reported(str(PAIR / "adamw"), str(PAIR / "muon"), *files, capsys=capsys)
    adamw, muon = json.loads(out.read_text())["runs"]
    assert (adamw["name"], muon["name"]) == ("adamw", "muon")
    bytes_of = {kind["name"]: kind["bytes"] for kind in muon["collectives"]}
    # 160,704 elements of 3 layers and 64 of padding: fp32 gradients, bf16 parameters
    assert bytes_of["reduce_scatter fp32 grads/reduce"] == 4 * 160_768
    assert bytes_of["broadcast bf16 params/gather"] == 2 * 160_768
    # one parameter is cut: pieces of it go one way, directions the other, 9.6 kB in all
    for phase, sent in (("gather", 4801), ("scatter", 4800)):
        assert (
            bytes_of[f"send bf16 muon/{phase}"]
            == bytes_of[f"recv bf16 muon/{phase}"]
            == sent
        )
    assert {kind["name"] for kind in adamw["collectives"]} == {
        "reduce_scatter fp32 grads/reduce",
        "broadcast bf16 params/gather",
        "all_reduce fp32",
    }
    for run in (adamw, muon):
        assert [rank["rank"] for rank in run["ranks"]] == [0, 1]
        for rank in run["ranks"]:
            parts = rank["compute_ms"] + rank["exposed_ms"] + rank["idle_ms"]
            assert parts == pytest.approx(rank["step_ms"]) and rank["steps"] == 1
            assert rank["exposed_ms"] <= rank["communication_ms"]
            assert 0 < rank["optimizer_ms"] < rank["step_ms"]
    lines = text.splitlines()
    reduced = [line for line in lines if line.startswith("reduce_scatter fp32")]
    # each run's own table, and side by side
    assert len(reduced) == 3 and len(reduced[-1].split()) == 5
    assert sum(line.startswith("rank ") for line in lines) == 4


def test_the_verb_may_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(PAIR / "adamw"), str(PAIR / "muon")]
    assert main(["trace", *paths]) == 0
    assert capsys.readouterr().out == _reported(*paths, capsys=capsys)


def test_no_escape_sequence_of_a_file_or_its_name_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = {"Process Group Description": "\x1b[31m\n red"}
    odd = event("ncclDevKernel_AllReduce_x", 0, 5, "kernel", args=args)
    path = write(tmp_path / "\x1b[2Jt.json", [STEP, odd, mark("\x1b", 0, 1)])
    assert "\x1b" not in _reported(str(path), capsys=capsys)
    path.write_text('[{"ph": "X", "ts": "\x1b[31m"}]')
    assert main(["trace", "report", str(path)]) == 1
    captured = capsys.readouterr().err
    assert "\x1b" not in captured and captured.count("\n") == 1
