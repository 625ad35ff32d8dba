"""Ranks of a run, and values of traces that nobody trusts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.traces.rank_trace import read
from megatron_muon.lab.traces.runs import files_of, names_of, run_times
from megatron_muon.lab.traces.stream import TraceError
from support.traces import event, gloo, kernel, mark, nccl, write

STEP = mark("ProfilerStep#3", 0, 1000)


# --- runs -------------------------------------------------------------------------------------


def test_a_run_has_means_over_ranks_and_the_largest_over_the_mean(tmp_path: Path) -> None:
    for rank, stop in enumerate((100, 300)):
        told = {"distributedInfo": {"rank": rank}}
        events = [STEP, event("aten::mm", 0, stop), gloo("send", 500, 600 + 100 * rank, 5)]
        write(tmp_path / f"{1 - rank}.json", events, **told)
    write(tmp_path / "merged.stage0.json", [STEP])  # no rank's
    run = run_times(tmp_path, "run")
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert run.mean("compute_ms") == pytest.approx(0.2)
    assert run.imbalance("compute_ms") == pytest.approx(1.5)
    kind = run.kinds["send fp32"]
    assert (kind.count, kind.bytes, round(kind.ms, 9)) == (1, 20, 0.15)
    assert kind.gbytes == pytest.approx(40 / 300e-6 / 1e9)


def test_ranks_are_known_by_the_files_names_too(tmp_path: Path) -> None:
    for name in ("adamw_fullstep_rank10.json", "adamw_fullstep_rank2.json"):
        write(tmp_path / name, [STEP])
    assert [rank.rank for rank in run_times(tmp_path, "x").ranks] == [2, 10]


def test_two_files_of_one_rank_are_an_error(tmp_path: Path) -> None:
    for name in ("adamw_rank0.json", "muon_rank0.json"):
        write(tmp_path / name, [STEP])
    with pytest.raises(TraceError, match=r"muon_rank0.json: adamw_rank0.json is of rank 0, too"):
        run_times(tmp_path, "x")


def test_runs_have_different_names() -> None:
    paths = [Path("/a/adamw/rank0.json.gz"), Path("/a/muon/rank0.json.gz")]
    assert names_of(paths) == ["adamw/rank0", "muon/rank0"]
    assert names_of(paths[:1]) == ["rank0"]
    assert names_of([paths[0], paths[0]]) == ["1:adamw/rank0", "2:adamw/rank0"]


def test_a_folder_without_traces_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no file in it that ends in .json or .json.gz"):
        files_of(tmp_path)
    with pytest.raises(TraceError, match="no such file or folder"):
        files_of(tmp_path / "none")


# --- nothing is trusted -----------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no time": ({"ts": None}, "ts is 'None'"),
    "text": ({"ts": "12"}, "ts is '12'"),
    "true": ({"dur": True}, "dur is 'True'"),
    "beyond floats": ({"ts": 10**400}, "ts is '1000"),
    "large": ({"ts": 1e300}, r"ts is '1e\+300'"),
    "negative": ({"dur": -1}, "dur is -1"),
    "args": ({"args": [1]}, r"args is '\[1\]'"),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_value_is_an_error_with_the_file_and_the_event(which: str, tmp_path: Path) -> None:
    change, said = WRONG[which]
    path = write(tmp_path / "t.json", [STEP, {"ph": "M"}, event("aten::mm", 0, 1) | change])
    with pytest.raises(TraceError, match=f"^{re.escape(str(path))}: event 2: {said}"):
        read(path)


@pytest.mark.parametrize("wrong", [-1, 1.5, "9", None, True, 1 << 70])
def test_a_wrong_number_of_elements_is_an_error(wrong: object, tmp_path: Path) -> None:
    args = nccl("allreduce", 1, 2, "Float") | {"In msg nelems": wrong}
    path = write(tmp_path / "t.json", [STEP, kernel("ncclDevKernel_AllReduce_x", 0, 1, **args)])
    with pytest.raises(TraceError, match=r"t.json: a collective's arguments: .* is no number"):
        read(path)


@pytest.mark.parametrize("key", ["pid", "tid", "name", "cat", "External id", "Process Group Name"])
@pytest.mark.parametrize("value", [[1, [2]], {"a": 1}, None, 1.5, "x" * 10_000])
def test_other_values_may_be_anything(key: str, value: object, tmp_path: Path) -> None:
    odd = kernel("ncclDevKernel_AllReduce_x", 0, 1)
    launch = event("record_param_comms", 0, 1, args={})
    for each in (odd, launch):
        (each["args"] if " " in key else each)[key] = value
    step = STEP | ({key: value} if key in ("pid", "tid") else {})
    trace = read(write(tmp_path / "t.json", [step, launch, odd]))
    assert len(trace.collectives) == (key not in ("name", "cat"))


def test_metadata_may_be_anything(tmp_path: Path) -> None:
    for rank in (None, "0", -1, [1], True, 10**400):
        path = write(tmp_path / "rank3.json", [STEP], distributedInfo={"rank": rank})
        assert run_times(path, "x").ranks[0].rank == 3
    write(tmp_path / "rank3.json", [STEP], distributedInfo=[1], megatron_muon="x")
    assert run_times(tmp_path, "x").ranks[0].rank == 3


def test_a_merged_trace_is_no_ranks(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [STEP], megatron_muon={"clocks": []})
    with pytest.raises(TraceError, match="merged from several ranks: give the folder"):
        read(path)


def test_a_trace_without_durations_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [{"ph": "M", "name": "process_name"}])
    with pytest.raises(TraceError, match="no event in it has a duration"):
        read(path)
