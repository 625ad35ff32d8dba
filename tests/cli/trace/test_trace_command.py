"""``megatron-muon trace``: the report of a real pair of runs, the merged timeline, and errors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megatron_muon.lab.commands import main
from megatron_muon.lab.trace.events import TraceError, TraceFile
from megatron_muon.lab.trace.figure import lanes
from megatron_muon.lab.trace.merge import Clock, Source, clock, merge
from megatron_muon.lab.trace.rank_trace import RankTrace
from megatron_muon.lab.trace.spans import Interval
from support.traces import PAIR, event, mark, write

STEP = mark("ProfilerStep#1", 0, 1000)


def _reported(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["trace", "report", *words]) == 0
    return capsys.readouterr().out


def test_a_report_of_a_real_pair_tells_our_exchange_from_megatrons_reduction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    text = _reported(str(PAIR / "adamw"), str(PAIR / "muon"), "--json", str(out), capsys=capsys)
    adamw, muon = json.loads(out.read_text())["runs"]
    assert (adamw["name"], muon["name"]) == ("adamw", "muon")
    bytes_of = {kind["name"]: kind["bytes"] for kind in muon["collectives"]}
    # 160,704 elements of 3 layers and 64 of padding: fp32 gradients, bf16 parameters
    assert bytes_of["reduce_scatter fp32 grads/reduce"] == 4 * 160_768
    assert bytes_of["broadcast bf16 params/gather"] == 2 * 160_768
    # one parameter is cut: pieces of it go one way, directions the other, 9.6 kB in all
    for phase, sent in (("gather", 4801), ("scatter", 4800)):
        assert bytes_of[f"send bf16 muon/{phase}"] == bytes_of[f"recv bf16 muon/{phase}"] == sent
    assert {kind["name"] for kind in adamw["collectives"]} == {
        *("reduce_scatter fp32 grads/reduce", "broadcast bf16 params/gather", "all_reduce fp32"),
    }
    for run in (adamw, muon):
        assert [rank["rank"] for rank in run["ranks"]] == [0, 1]
        for rank in run["ranks"]:
            parts = rank["compute_ms"] + rank["exposed_ms"] + rank["idle_ms"]
            assert parts == pytest.approx(rank["step_ms"]) and rank["steps"] == 1
            whole = rank["overlapped_ms"] + rank["exposed_ms"]
            assert whole == pytest.approx(rank["communication_ms"])
            assert 0 < rank["optimizer_ms"] < rank["step_ms"]
    lines = text.splitlines()
    (line,) = [line for line in lines if line.startswith("MB in reduce_scatter fp32 grads/reduce")]
    assert line.endswith("(1.00)")
    assert sum(line.startswith("rank ") for line in lines) == 4


def test_ratios_are_to_the_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, stop in (("a", 100), ("b", 150), ("c", 0)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "rank0.json", [STEP, event("aten::mm", 0, stop)])
    words = [str(tmp_path / name) for name in "abc"]
    text = _reported(*words, "--json", str(tmp_path / "x.json"), capsys=capsys)
    (line,) = [line for line in text.splitlines() if line.startswith("compute  ")]
    assert line.split() == ["compute", "0.1", "0.15", "(1.50)", "0", "(0.00)"]
    ratios = json.loads((tmp_path / "x.json").read_text())["ratios"]
    assert [round(ratio["compute"], 9) for ratio in ratios] == [1.5, 0]
    assert ratios[0]["communication"] is None  # nothing over nothing


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


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["report"], 2, "the following arguments are required: TRACE"),
        (["report", "none"], 1, "none: there is no such file or folder"),
        (["report", "bad.json"], 1, "bad.json: it is no trace that can be read: it has no trace"),
        (["report", "bad.json.gz"], 1, "bad.json.gz: it is no trace that can be read"),
        (["report", "ok.json", "--json", "no/x.json"], 2, "--json no/x.json: there is no folder"),
        (["report", "ok.json", "--plot", "no/x.png"], 2, "--plot no/x.png: there is no folder no"),
        (["merge", "ok.json"], 2, "merge takes one folder"),
        (["merge", "."], 1, "bad.json"),
        (["run", "--steps", "5"], 2, "is gone: give the training command --muon-trace-steps"),
    ],
)
def test_errors_are_one_line_that_names_the_file(
    words: list[str],
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "ok.json", [STEP])
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "bad.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}' * 99)[:-9])
    try:
        assert main(["trace", *words]) == status
    except SystemExit as ended:
        assert ended.code == status
    captured = capsys.readouterr()
    assert said in captured.err.splitlines()[-1] and captured.out == ""


@pytest.mark.parametrize("command", ["trace", "curves"])
def test_help_fits_a_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 80


def test_a_picture_has_every_rank_and_lane(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.svg"
    _reported(str(PAIR / "adamw"), str(PAIR / "muon"), "--plot", str(out), capsys=capsys)
    shown = set(lanes(RankTrace(PAIR / "muon" / "rank0.json.gz")))
    assert {"compute", "muon/newton_schulz", "reduce_scatter grads/reduce"} <= shown
    for text in {"adamw, rank 1", "muon, rank 0", *shown}:
        assert f"<!-- {text} -->" in out.read_text()


def _source(rank: int, boot: str, meetings: list[Interval]) -> Source:
    return Source(Path(), rank, 0, boot, 0, meetings)


def test_meetings_bound_the_offset_of_a_clock_from_both_sides() -> None:
    # true time; rank 3 shows 5000 more; each meeting ends on both after both have come
    first = _source(0, "a", [(0, 110), (500, 530)])
    other = _source(3, "b", [(5100, 5120), (5490, 5525)])
    # from below: 5100 - 110, 5490 - 530; from above: 5120 - 0, 5525 - 500
    assert clock(first, other) == Clock(3, (4990 + 5025) / 2, (5025 - 4990) / 2, "meetings")
    first = _source(0, "a", [(0, 100)])
    assert clock(first, _source(1, "a", [(90, 105)])) == Clock(1, 0.0, 0.0, "same machine")
    with pytest.raises(ValueError, match="ranks 0 and 1 of one machine met 900 us apart"):
        clock(first, _source(1, "a", [(1000, 1010)]))
    with pytest.raises(ValueError, match="ranks 0 and 1 met the others 1 and 0 times"):
        clock(first, _source(1, "b", []))
    assert clock(_source(0, "", []), _source(1, "", [])) == Clock(1, 0.0, None, "not aligned")


def _two_hosts(folder: Path) -> None:
    """Ranks 0 and 1 of stage 0 on two machines, rank 2 alone in stage 1."""
    for rank, (boot, ahead, base) in enumerate((("a", 0, 1000), ("b", 700, 3000), ("c", 0, 0))):
        begin = ahead + (1000 - base) / 1e3  # of a base of its own
        events = [
            {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
            mark("trace/clock", begin, begin + 10),
            mark("ProfilerStep#1", begin + 20, begin + 100),
            {"ph": "s", "id": 4, "pid": 7, "tid": 1, "ts": begin + 30, "cat": "ac2g", "name": "x"},
        ]
        own = {"stage": int(rank == 2), "boot": boot}
        told = {"distributedInfo": {"rank": rank}, "baseTimeNanoseconds": base}
        write(folder / f"rank{rank}.json.gz", events, megatron_muon=own, **told)


def test_a_merged_trace_has_a_stages_ranks_on_one_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _two_hosts(tmp_path)
    assert main(["trace", "merge", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "rank 1: clock moved by -700.0 us, within 10.0 us, by meetings" in text
    merged = sorted(path.name for path in tmp_path.glob("merged*"))
    assert merged == ["merged.stage0.json.gz", "merged.stage1.json.gz"]
    file = TraceFile(tmp_path / merged[0])
    events = list(file.events())
    steps = [e for e in events if e["name"] == "ProfilerStep#1"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in steps] == [(0, 20.0, 80), (1000, 20.0, 80)]
    named = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert named == ["rank 0: 7", "rank 1: 7"]
    assert [e["id"] for e in events if e.get("ph") == "s"] == ["0.4", "1.4"]
    assert file.metadata["megatron_muon"]["clocks"][1]["how"] == "meetings"


def test_a_merge_of_the_real_pair_keeps_every_event(tmp_path: Path) -> None:
    names = ("process_name", "process_sort_index")
    count = 0
    for file in (PAIR / "muon").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
        count += sum(event.get("name") not in names for event in TraceFile(file).events())
    ((path, clocks),) = (merged := merge(tmp_path)).items()
    assert [clock.how for clock in clocks] == ["first", "same machine"]
    events = [e for e in TraceFile(path).events() if e.get("name") not in names]
    assert len(events) == count
    assert len({e["pid"] // 1000 for e in events if e["name"] == "gloo:send"}) == 2
    assert merge(tmp_path) == merged  # the merged file is no rank's


def test_a_merge_overwrites_no_file_that_a_link_names_and_one_that_fails_leaves_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "of the user").write_text("kept")
    _two_hosts(tmp_path)
    for name in ("merged.stage0.json.gz", ".merged.stage0.json.gz"):
        (tmp_path / name).symlink_to(tmp_path / "of the user")
    assert main(["trace", "merge", str(tmp_path)]) == 0
    assert (tmp_path / "of the user").read_text() == "kept"
    for path in tmp_path.glob("*merged*"):
        path.unlink()
    for base in ("x", -1, 1 << 80):
        write(tmp_path / "rank7.json", [STEP], baseTimeNanoseconds=base)
        with pytest.raises(TraceError, match=r"rank7.json: baseTimeNanoseconds is"):
            merge(tmp_path)
    write(tmp_path / "rank7.json", [STEP | {"pid": at} for at in range(2000)])
    with pytest.raises(TraceError, match=r"rank7.json: it has more than 1000 processes"):
        merge(tmp_path)
    assert not list(tmp_path.glob("*merged.json*")) and not list(tmp_path.glob(".merged*"))
