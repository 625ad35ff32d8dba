"""Reading traces that nobody trusts: one event at a time, one error for what is wrong."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.trace import events
from megatron_muon.lab.trace.events import TraceError, files_of, read_trace
from megatron_muon.lab.trace.rank_trace import RankTrace
from megatron_muon.lab.trace.runs import read_run
from support.traces import event, mark, write

STEP = mark("ProfilerStep#3", 0, 1000)
EVENTS: list[dict[str, Any]] = [
    {"name": 'a "quoted" name, with ] and } and \\', "args": {"list": [1, [2, {}]]}},
    {},
    {"name": "", "ts": 1.5, "n": None, "nested": {"a": {"b": [True, False]}}},
]


def _written(tmp_path: Path, text: str | bytes, name: str = "t.json") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_an_object_a_list_and_gzip_are_the_same_events(tmp_path: Path) -> None:
    before, after = {"schemaVersion": 1, "é": ["ü", 12]}, {"baseTimeNanoseconds": 1234567}
    whole = json.dumps({**before, "traceEvents": EVENTS, **after}, ensure_ascii=False, indent=1)
    for text in (f"\n {whole} \n", gzip.compress(whole.encode())):
        read = read_trace(_written(tmp_path, text))
        assert (read.events, read.metadata) == (EVENTS, before | after)
    read = read_trace(_written(tmp_path, json.dumps(EVENTS)))
    assert (read.events, read.metadata) == (EVENTS, {})


GZIPPED = gzip.compress(json.dumps({"traceEvents": EVENTS * 50}).encode())
DAMAGED: dict[str, tuple[str | bytes, str]] = {
    "text": ("hello", "it is no trace"),
    "no list": ('{"traceEvents": {}}', "it has no traceEvents"),
    "cut": ('{"traceEvents": [{"name": "a"}, {"na', "it is no trace"),
    "number": ("[1, 2]", "event 0 is no object but '1'"),
    "NaN": ('[{"name": "a", "ts": NaN}]', "NaN is no number of JSON"),
    "deep": ('[{"a":' + "[" * 200_000, "it is nested too deeply"),
    "cut gzip": (GZIPPED[:-20], "it is no trace"),
}


@pytest.mark.parametrize("which", DAMAGED)
def test_what_is_wrong_is_one_error_that_names_the_file(which: str, tmp_path: Path) -> None:
    text, said = DAMAGED[which]
    path = _written(tmp_path, text)
    with pytest.raises(TraceError, match=f"^{re.escape(str(path))}: .*{re.escape(said)}") as caught:
        RankTrace(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_pipe_a_folder_or_a_file_beyond_all_bounds_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "missing"):
        with pytest.raises(TraceError, match=str(path)):
            RankTrace(path)
    monkeypatch.setattr(events, "MOST", 10_000)
    for packed in (gzip.compress, bytes):
        text = json.dumps([{"name": "a" * 50_000}]).encode()
        with pytest.raises(TraceError, match="trace fewer steps"):
            read_trace(_written(tmp_path, packed(text)))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no time": ({"ts": None}, "ts is 'None'"),
    "beyond floats": ({"ts": 1e300}, r"ts is '1e\+300"),
    "negative": ({"dur": -1}, "dur is -1"),
    "args": ({"args": [1]}, r".*args is '\[1\]'"),
    "20 sizes of 2^61": (
        {"name": "c10d::send", "args": {"Input Dims": [[1 << 61] * 20]}},
        r"'\d+' is no number of elements",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_value_is_an_error_with_the_file_and_the_event(which: str, tmp_path: Path) -> None:
    change, said = WRONG[which]
    path = write(tmp_path / "t.json", [STEP, {"ph": "M"}, event("aten::mm", 0, 1) | change])
    with pytest.raises(TraceError, match=f"^{re.escape(str(path))}: .*event 2: {said}"):
        RankTrace(path)


def test_ranks_are_known_by_the_trace_else_by_the_files_name(tmp_path: Path) -> None:
    for told in (None, "0", -1, [1], True, 1 << 80):
        path = write(tmp_path / "rank3.json", [STEP], distributedInfo={"rank": told})
        assert list(read_run(path, "x").ranks.index) == [3]
    write(tmp_path / "adamw_rank10.json", [STEP])
    write(tmp_path / "rank3.json", [STEP], distributedInfo={"rank": 2})
    assert list(read_run(tmp_path, "x").ranks.index) == [2, 10]
    write(tmp_path / "muon_rank10.json", [STEP])
    with pytest.raises(TraceError, match=r"muon_rank10.json: adamw_rank10.json is of rank 10, too"):
        read_run(tmp_path, "x")


def test_a_trace_of_no_rank_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no event in it has a duration"):
        RankTrace(write(tmp_path / "t.json", [{"ph": "M", "name": "process_name"}]))
    (tmp_path / "none").mkdir()
    with pytest.raises(TraceError, match=r"no file in it that ends in .json or .json.gz"):
        files_of(tmp_path / "none")
