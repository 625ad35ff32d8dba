"""Reading traces that nobody trusts: one event at a time, one error for what is wrong."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.trace import events, rank_trace
from megatron_muon.lab.trace.events import TraceError, TraceFile, files_of
from megatron_muon.lab.trace.rank_trace import RankTrace
from megatron_muon.lab.trace.runs import names_of, read_run
from support import ROOT
from support.traces import event, gloo, kernel, mark, nccl, write

STEP = mark("ProfilerStep#3", 0, 1000)
EVENTS: list[dict[str, Any]] = [
    {"name": 'a "quoted" name, with ] and } and \\', "args": {"list": [1, [2, {}]]}},
    {},
    {"name": "", "ts": 1.5, "n": None, "nested": {"a": {"b": [True, False]}}},
]


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    file = TraceFile(path)
    return list(file.events()), {key: file.metadata[key] for key in file.metadata if key[0] != "t"}


def _written(tmp_path: Path, text: str | bytes, name: str = "t.json") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 18])
def test_events_are_the_same_however_the_file_is_cut(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "CHUNK", chunk)
    before, after = {"schemaVersion": 1, "é": ["ü", 12]}, {"baseTimeNanoseconds": 1234567}
    whole = json.dumps({**before, "traceEvents": EVENTS, **after}, ensure_ascii=False, indent=1)
    assert _read(_written(tmp_path, f"\n {whole} \n")) == (EVENTS, before | after)
    assert _read(_written(tmp_path, gzip.compress(whole.encode()))) == (EVENTS, before | after)
    assert _read(_written(tmp_path, json.dumps(EVENTS))) == (EVENTS, {})


GZIPPED = gzip.compress(json.dumps({"traceEvents": EVENTS * 50}).encode())
DAMAGED: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "it has no traceEvents"),
    "text": ("hello", "it has no traceEvents"),
    "no list": ('{"traceEvents": {}}', "it has no traceEvents"),
    "cut": ('{"traceEvents": [{"name": "a"}, {"na', "damaged or cut off"),
    "cut between": ('{"traceEvents": [{"name": "a"}', "damaged or cut off"),
    "cut after": ('{"traceEvents": [{"name": "a"}]', "damaged or cut off"),
    "more": ('{"traceEvents": []} x', "damaged or cut off"),
    "number": ("[1, 2]", "event 0 is no object but '1'"),
    "no JSON": ('[{"name": x}]', "damaged or cut off"),
    "NaN": ('[{"name": "a", "ts": NaN}]', "NaN is no number of JSON"),
    "digits": (f'[{{"ts": {"9" * 9999}}}]', "it is no trace"),
    "deep": ('[{"a":' + "[" * 200_000, "it is no trace"),
    "cut gzip": (GZIPPED[:-20], "it is no trace"),
    "gzip of nothing": (gzip.compress(b""), "it has no traceEvents"),
}


@pytest.mark.parametrize("which", DAMAGED)
def test_what_is_wrong_is_one_error_that_names_the_file(which: str, tmp_path: Path) -> None:
    text, said = DAMAGED[which]
    path = _written(tmp_path, text)
    with pytest.raises(TraceError, match=f"^{re.escape(str(path))}: .*{re.escape(said)}") as caught:
        RankTrace(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_trace_with_random_bytes_is_read_or_is_an_error_of_its_own(tmp_path: Path) -> None:
    draw = random.Random(0)
    some = [STEP, event("c10d::send", 5, 9, args=nccl("send", 4, 2, "Half")), gloo("send", 6, 9)]
    plain = json.dumps({"a": [1.5, "x"], "traceEvents": some}).encode()
    for text in (plain, gzip.compress(plain)):
        for number in range(150):
            damaged = bytearray(text)
            for _ in range(draw.randint(1, 3)):
                damaged[draw.randrange(len(text))] = draw.randrange(256)
            path = _written(tmp_path, bytes(damaged), f"{number}.json")
            try:
                read_run(path, "x")
            except TraceError as error:
                assert str(path) in str(error)


def test_a_pipe_a_folder_or_an_event_beyond_all_bounds_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "missing"):
        with pytest.raises(TraceError, match=str(path)):
            RankTrace(path)
    monkeypatch.setattr(events, "MOST", 10_000)
    monkeypatch.setattr(events, "CHUNK", 1000)
    with pytest.raises(TraceError, match="an event has more than 10000 characters"):
        _read(_written(tmp_path, json.dumps([{"name": "a" * 50_000}])))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no time": ({"ts": None}, "ts is 'None'"),
    "true": ({"dur": True}, "dur is 'True'"),
    "beyond floats": ({"ts": 10**400}, "ts is '1000"),
    "negative": ({"dur": -1}, "dur is -1"),
    "args": ({"args": [1]}, r".*args is '\[1\]'"),
    "20 sizes of 2^61": (
        {"name": "c10d::send", "args": {"Input Dims": [[1 << 61] * 20]}},
        r"'\d+' is no number of elements",
    ),
    "elements": ({"name": "c10d::send", "args": {"In msg nelems": -1}}, "'-1' is no number"),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_value_is_an_error_with_the_file_and_the_event(which: str, tmp_path: Path) -> None:
    change, said = WRONG[which]
    path = write(tmp_path / "t.json", [STEP, {"ph": "M"}, event("aten::mm", 0, 1) | change])
    with pytest.raises(TraceError, match=f"^{re.escape(str(path))}: .*event 2: {said}"):
        RankTrace(path)


@pytest.mark.parametrize("key", ["pid", "tid", "name", "cat", "External id", "Process Group Name"])
@pytest.mark.parametrize("value", [[1, [2]], None, 1.5, "x" * 10_000])
def test_other_values_may_be_anything(key: str, value: object, tmp_path: Path) -> None:
    odd = kernel("ncclDevKernel_AllReduce_x", 0, 1)
    launch = event("record_param_comms", 0, 1, args={})
    for each in (odd, launch):
        (each["args"] if " " in key else each)[key] = value
    step = STEP | ({key: value} if key in ("pid", "tid") else {})
    trace = RankTrace(write(tmp_path / "t.json", [step, launch, odd]))
    assert len(trace.calls) == (key not in ("name", "cat"))


def test_arguments_that_are_not_needed_are_not_kept_and_numbers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"Input Dims": [[2, 3]], "Concrete Inputs": ["x" * 100_000], "Group size": 2}
    path = write(tmp_path / "t.json", [STEP, event("c10d::send", 0, 9, args=args)])
    (call,) = RankTrace(path).calls
    kept = (getattr(call, name) for name in call.__slots__)
    assert sum(map(sys.getsizeof, kept)) < 1000 and call.elements == 6
    monkeypatch.setattr(rank_trace, "_MOST_MARKS", 1)
    with pytest.raises(TraceError, match="there are more than 1 collectives and annotations"):
        RankTrace(write(tmp_path / "t.json", [STEP] * 3))


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


def test_runs_have_different_names() -> None:
    paths = [Path("/a/adamw/rank0.json.gz"), Path("/a/muon/rank0.json.gz")]
    assert names_of(paths) == ["adamw/rank0", "muon/rank0"]
    assert names_of(paths[:1]) == ["rank0"]
    assert names_of([paths[0], paths[0]]) == ["1:adamw/rank0", "2:adamw/rank0"]


def test_a_trace_of_no_rank_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no event in it has a duration"):
        RankTrace(write(tmp_path / "t.json", [{"ph": "M", "name": "process_name"}]))
    (tmp_path / "none").mkdir()
    with pytest.raises(TraceError, match=r"no file in it that ends in .json or .json.gz"):
        files_of(tmp_path / "none")


READS = """
import re, sys
from pathlib import Path
from megatron_muon.lab.trace.rank_trace import RankTrace
def peak():  # not ru_maxrss, which begins with the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10
before = peak()
print(len(RankTrace(Path(sys.argv[1])).calls), peak() - before)
"""


@pytest.mark.parametrize(
    ("megabytes", "most"), [(20, 20), pytest.param(500, 150, marks=pytest.mark.slow)]
)
def test_a_large_trace_takes_a_small_part_of_its_size(
    megabytes: int, most: int, tmp_path: Path
) -> None:
    path, at, args = tmp_path / "t.json", 0, {"Input Dims": [[4, 1024, 4096], [4096, 4096]]}
    with path.open("w") as out:
        out.write('{"schemaVersion": 1, "traceEvents": [\n')
        while out.tell() < megabytes * 10**6:
            both = (event("aten::mm", 0, 7.5, args=args), kernel("void gemm(x)", 0, 7.5))
            text = "".join(json.dumps(each | {"ts": "AT"}) + ",\n" for each in both)
            out.write("".join(text.replace('"AT"', str(at + 10 * n)) for n in range(1000)))
            at += 10_000
        out.write(json.dumps(kernel("ncclDevKernel_AllReduce_Sum(x)", at, at + 5)) + "]}")
    command = [sys.executable, "-c", READS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    calls, peak = map(int, done.stdout.split())
    assert calls == 1 and peak < most  # MiB; json.load takes 150 for the smaller one
