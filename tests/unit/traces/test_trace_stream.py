"""Reading a Chrome trace one event at a time, and what is wrong with a file."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.traces import stream
from megatron_muon.lab.traces.stream import TraceError, TraceFile

EVENTS: list[dict[str, Any]] = [
    {"name": 'a "quoted" name, with ] and } and \\', "args": {"list": [1, [2, {}]]}},
    {},
    {"name": "", "ts": 1.5, "n": None, "nested": {"a": {"b": [True, False]}}},
]


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    file = TraceFile(path)
    return list(file.events()), file.metadata


def _written(tmp_path: Path, text: str | bytes, name: str = "t.json") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 18])
def test_events_are_the_same_however_the_file_is_cut(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "CHUNK", chunk)
    before, after = {"schemaVersion": 1, "é": ["ü", 12]}, {"baseTimeNanoseconds": 1234567}
    whole = json.dumps({**before, "traceEvents": EVENTS, **after}, ensure_ascii=False, indent=1)
    assert _read(_written(tmp_path, f"\n {whole} \n")) == (EVENTS, before | after)
    assert _read(_written(tmp_path, json.dumps(EVENTS))) == (EVENTS, {})


def test_a_compressed_file_is_read_whatever_its_name_is(tmp_path: Path) -> None:
    text = gzip.compress(json.dumps({"traceEvents": EVENTS}).encode())
    assert _read(_written(tmp_path, text)) == (EVENTS, {})


@pytest.mark.parametrize("text", ['{"traceEvents": []}', "[]", '{"a": 1, "traceEvents": [ ]}'])
def test_a_trace_may_have_no_events(text: str, tmp_path: Path) -> None:
    assert _read(_written(tmp_path, text))[0] == []


GZIPPED = gzip.compress(json.dumps({"traceEvents": EVENTS * 50}).encode())
DAMAGED = {
    "empty": ("", "it is empty"),
    "text": ("hello", "neither an object with traceEvents nor a list"),
    "no events": ('{"a": 1}', "there is no traceEvents in it"),
    "nothing": ("{}", "there is no traceEvents in it"),
    "no list": ('{"traceEvents": {}}', "traceEvents is no list"),
    "twice": ('{"traceEvents": [], "traceEvents": []}', "traceEvents is in it twice"),
    "cut": ('{"traceEvents": [{"name": "a"}, {"na', "ends in the middle of a value"),
    "cut between": ('{"traceEvents": [{"name": "a"}', "the list of events has no end"),
    "cut after": ('{"traceEvents": [{"name": "a"}]', "the trace has no end"),
    "more": ('{"traceEvents": []} x', "there is more after its end"),
    "no comma": ('[{"name": "a"} {"name": "b"}]', "'{' stands in the list of events"),
    "no key": ('{1: 2, "traceEvents": []}', "'1' is no key"),
    "number": ("[1, 2]", "event 0 is no object but '1'"),
    "no JSON": ('[{"name": x}]', "Expecting value at 'x}]'"),
    "NaN": ('[{"name": "a", "ts": NaN}]', "NaN is no number of JSON"),
    "infinity": ('[{"name": "a", "ts": -Infinity}]', "-Infinity is no number of JSON"),
    "digits": (f'[{{"ts": {"9" * 9999}}}]', "it is no trace"),
    "deep list": ("[" * 200_000, "it is no trace"),
    "deep event": ('[{"a":' + "[" * 200_000, "it is no trace"),
    "cut gzip": (GZIPPED[:-20], "it cannot be read"),
    "changed gzip": (GZIPPED[:40] + bytes([GZIPPED[40] ^ 255]) + GZIPPED[41:], "it cannot be"),
    "gzip of nothing": (gzip.compress(b""), "it is empty"),
}


@pytest.mark.parametrize("which", DAMAGED)
def test_what_is_wrong_is_one_error_that_names_the_file(which: str, tmp_path: Path) -> None:
    text, said = DAMAGED[which]
    path = _written(tmp_path, text)
    with pytest.raises(TraceError, match=f"^{re.escape(str(path))}: .*{re.escape(said)}"):
        _read(path)


def test_an_event_beyond_all_bounds_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MOST", 10_000)
    monkeypatch.setattr(stream, "CHUNK", 1000)
    path = _written(tmp_path, json.dumps([{"name": "a" * 30_000}]))
    with pytest.raises(TraceError, match="a value in it has more than 10000 characters"):
        _read(path)


def test_a_pipe_or_a_folder_is_an_error_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing"):
        with pytest.raises(TraceError, match=str(path)):
            _read(path)


def test_a_trace_with_random_bytes_is_read_or_is_an_error_of_its_own(tmp_path: Path) -> None:
    draw = random.Random(0)
    plain = json.dumps({"a": [1.5, "x"], "traceEvents": EVENTS}).encode()
    for text in (plain, GZIPPED):
        for number in range(150):
            damaged = bytearray(text)
            for _ in range(draw.randint(1, 3)):
                damaged[draw.randrange(len(text))] = draw.randrange(256)
            path = _written(tmp_path, bytes(damaged), f"{number}.json")
            try:
                _read(path)
            except TraceError as error:
                assert str(path) in str(error)
