"""``megatron-muon plan --sweep`` and ``--explain``: the same plan at other values of its flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_muon.lab.commands import main
from support.models.model_flags import TINY as TINY_WORDS

TINY = " ".join(TINY_WORDS)
TP = "--tensor-model-parallel-size"


def written(words: str, file: Path) -> dict:
    assert main(f"plan {TINY} {words} --json {file}".split()) == 0
    return json.loads(file.read_text())


def test_a_point_of_a_sweep_is_the_plan_with_that_flag(tmp_path: Path) -> None:
    swept = written(f"{TP} 2 --sweep dp=1,2", tmp_path / "sweep.json")
    alone = written(f"{TP} 2 --world-size 4", tmp_path / "plan.json")
    assert [point["value"] for point in swept["points"]] == ["1", "2"]
    last = swept["points"][-1]
    assert last["ranks"]["world"] == 4
    assert {key: last[key] for key in alone} == alone


def test_a_value_that_is_refused_has_a_reason_and_the_others_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = written("--world-size 4 --sweep tp=1,3,4", tmp_path / "sweep.json")
    assert "3: refused: --world-size 4 is not a multiple of TP" in capsys.readouterr().out
    assert [bool(point.get("stages")) for point in swept["points"]] == [True, False, True]


def test_any_flag_can_be_swept(tmp_path: Path) -> None:
    qkv = "*.linear_qkv.weight"
    words = f"--world-size 2 --sweep muon-split=none,{qkv}=whole,{qkv}=heads"
    swept = written(words, tmp_path / "sweep.json")
    matrices = [point["stages"][0]["matrices"] for point in swept["points"]]
    # two layers of qkv, proj, fc1 and fc2: q, k and v are one, three or 3 x 4 heads
    assert matrices == [2 * (3 + 3), 2 * (1 + 3), 2 * (12 + 3)]
    words = f"{TP} 2 --world-size 4 --sweep muon-ns-dtype=bf16,fp32"  # TP always moves some
    swept = written(words, tmp_path / "sweep.json")
    sent = [point["stages"][0]["rows"][1]["inside"]["mean"] for point in swept["points"]]
    assert sent[1] == 2 * sent[0] > 0


def test_batches_change_the_share_and_not_the_step(tmp_path: Path) -> None:
    words = "--world-size 2 --seq-length 32 --sweep batch=8,16"
    small, large = written(words, tmp_path / "sweep.json")["points"]
    assert large["training"]["seconds"] == pytest.approx(2 * small["training"]["seconds"])
    one, two = (point["step"]["contiguous"] for point in (small, large))
    assert one["seconds"] == two["seconds"] and one["share"] > two["share"]


def test_a_gain_is_the_difference_of_two_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = "--world-size 4 --muon-ns-dtype bf16"
    explained = written(f"{base} --explain", tmp_path / "explain.json")
    changes = {one["change"]: one for one in explained["changes"]}
    assert "change, the fastest first" in capsys.readouterr().out
    plain = explained["step"]["contiguous"]["seconds"]
    for words in ("--muon-ns-dtype fp16", "--products kernel", f"{TP} 2"):
        other = written(f"{base} {words}", tmp_path / "other.json")
        seconds = other["step"]["contiguous"]["seconds"]
        assert changes[words]["seconds"] == seconds
        assert changes[words]["gain"] == pytest.approx((plain - seconds) / plain)
    seconds = [one["seconds"] for one in explained["changes"]]
    assert seconds == sorted(seconds)
