"""``megatron-muon trace``: the report of a real pair of runs, the merged timeline, and errors."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.commands import main
from megatron_muon.lab.traces.clocks import Clock, Stamps, clocks
from megatron_muon.lab.traces.lanes import lanes
from megatron_muon.lab.traces.merge import merge
from megatron_muon.lab.traces.rank_trace import read
from megatron_muon.lab.traces.stream import TraceError, TraceFile
from support.traces import PAIR, event, mark, write

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
STEP = mark("ProfilerStep#1", 0, 1000)


def _reported(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["trace", "report", *words]) == 0
    return capsys.readouterr().out


# --- the report -------------------------------------------------------------------------------


def test_the_files_of_the_pair_are_small() -> None:
    files = sorted(PAIR.rglob("*.gz"))
    assert len(files) == 4 and all(file.stat().st_size < 200_000 for file in files)


def test_a_report_of_a_real_pair_tells_our_exchange_from_megatrons_reduction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    text = _reported(str(PAIR / "adamw"), str(PAIR / "muon"), "--json", str(out), capsys=capsys)
    adamw, muon = json.loads(out.read_text())["runs"]
    assert (adamw["name"], muon["name"]) == ("adamw", "muon")
    bytes_of = {
        f"{kind['operation']} {kind['dtype']} {kind['place']}": kind["bytes"]
        for kind in muon["collectives"]
    }
    # 160,704 elements of 3 layers and 64 of padding: fp32 gradients, bf16 parameters
    assert bytes_of["reduce_scatter fp32 grads/reduce"] == 4 * 160_768
    assert bytes_of["broadcast bf16 params/gather"] == 2 * 160_768
    # one parameter is cut: pieces of it go one way, directions the other, 9.6 kB in all
    for phase, sent in (("gather", 4801), ("scatter", 4800)):
        assert bytes_of[f"send bf16 muon/{phase}"] == bytes_of[f"recv bf16 muon/{phase}"] == sent
    assert {name.split()[2] for name in bytes_of if "muon/" in name} == {
        "muon/gather",
        "muon/scatter",
    }
    others = {f"{kind['operation']} {kind['place']}" for kind in adamw["collectives"]}
    assert others == {"reduce_scatter grads/reduce", "broadcast params/gather", "all_reduce "}
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
    assert [round(ratio["compute_ms"], 9) for ratio in ratios] == [1.5, 0]
    assert ratios[0]["communication_ms"] is None  # nothing over nothing


def test_names_of_a_file_cannot_write_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"Process Group Description": "\x1b[31m\n red"}
    args = {"name": "ncclDevKernel_AllReduce_x", "args": odd}
    path = write(tmp_path / "t.json", [STEP, event("x", 0, 5, "kernel") | args])
    assert "\x1b" not in _reported(str(path), capsys=capsys)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "the following arguments are required: TRACE"),
        (["none"], 1, "none: there is no such file or folder"),
        (["bad.json"], 1, "bad.json: it is no trace: there is no traceEvents in it"),
        (["bad.json.gz"], 1, "bad.json.gz: it cannot be read"),
        (["ok.json", "--json", "no/x.json"], 2, "--json no/x.json: there is no folder no"),
        (["ok.json", "--plot", "no/x.png"], 2, "--plot no/x.png: there is no folder no"),
        (["."], 1, "bad.json"),
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
    if status == 2:
        with pytest.raises(SystemExit) as ended:
            main(["trace", "report", *words])
        assert ended.value.code == 2
    else:
        assert main(["trace", "report", *words]) == 1
    captured = capsys.readouterr()
    assert said in captured.err.splitlines()[-1] and captured.out == ""


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is here")
def test_a_picture_without_matplotlib_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "report", str(PAIR / "muon"), "--plot", str(tmp_path / "x.png")])
    assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is an extra")
def test_a_picture_has_every_rank_and_lane(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.svg"
    _reported(str(PAIR / "adamw"), str(PAIR / "muon"), "--plot", str(out), capsys=capsys)
    shown = {lane.name for lane in lanes(read(PAIR / "muon" / "rank0.json.gz"))}
    assert {"compute", "muon/newton_schulz", "reduce_scatter grads/reduce"} <= shown
    for text in {"adamw, rank 1", "muon, rank 0", *shown}:
        assert f"<!-- {text} -->" in out.read_text()


# --- one timeline -----------------------------------------------------------------------------


def test_meetings_bound_the_offset_of_a_clock_from_both_sides() -> None:
    # true time; rank 1 shows 5000 more; each meeting ends on both after both have come
    first = Stamps(0, "a", [(0, 110), (500, 530)])
    other = Stamps(3, "b", [(5100, 5120), (5490, 5525)])
    assert clocks([first, other]) == [
        Clock(0, 0.0, 0.0, "first"),
        # from below: 5100 - 110, 5490 - 530; from above: 5120 - 0, 5525 - 500
        Clock(3, (4990 + 5025) / 2, (5025 - 4990) / 2, "meetings"),
    ]


def test_ranks_of_one_machine_share_a_clock_unless_meetings_contradict() -> None:
    first = Stamps(0, "a", [(0, 100)])
    assert clocks([first, Stamps(1, "a", [(90, 105)])])[1] == Clock(1, 0.0, 0.0, "same machine")
    with pytest.raises(ValueError, match=r"ranks 0 and 1 are of one machine, and .* 900 us apart"):
        clocks([first, Stamps(1, "a", [(1000, 1010)])])


def test_clocks_that_nothing_bounds_are_said_to_be_not_aligned() -> None:
    assert clocks([Stamps(0, "", []), Stamps(1, "", [])])[1] == Clock(1, 0.0, None, "not aligned")
    with pytest.raises(ValueError, match="rank 0 met the others 1 times and rank 1 0 times"):
        clocks([Stamps(0, "a", [(0, 1)]), Stamps(1, "b", [])])


def _two_hosts(folder: Path) -> None:
    """Ranks 0 and 1 of stage 0 on two machines, rank 2 alone in stage 1."""
    for rank, (boot, clock, base) in enumerate((("a", 0, 1000), ("b", 700, 3000), ("c", 0, 0))):
        begin = clock + (1000 - base) / 1e3  # of a base of its own
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
    assert sorted(path.name for path in tmp_path.glob("merged*")) == [
        "merged.stage0.json.gz",
        "merged.stage1.json.gz",
    ]
    file = TraceFile(tmp_path / "merged.stage0.json.gz")
    events = list(file.events())
    steps = [e for e in events if e["name"] == "ProfilerStep#1"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in steps] == [(0, 20.0, 80), (1000, 20.0, 80)]
    named = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert named == ["rank 0: 7", "rank 1: 7"]
    flows = [e["id"] for e in events if e.get("ph") == "s"]
    assert flows == ["0.4", "1.4"]  # Perfetto joins flows by their number
    assert file.metadata["megatron_muon"]["clocks"][1]["how"] == "meetings"
    with pytest.raises(TraceError, match="merged from several ranks"):
        read(file.path)


def test_a_merge_of_the_real_pair_keeps_every_event(tmp_path: Path) -> None:
    count = 0
    for file in (PAIR / "muon").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
        count += sum(_is_kept(event) for event in TraceFile(file).events())
    (merged,) = merge(tmp_path)
    assert (merged.stage, [clock.how for clock in merged.clocks]) == (0, ["first", "same machine"])
    events = list(TraceFile(merged.path).events())
    assert sum(map(_is_kept, events)) == count
    gathers = [e for e in events if e["name"] == "gloo:send"]
    assert len({e["pid"] // 1000 for e in gathers}) == 2
    assert merge(tmp_path) == [merged]  # the merged file is no rank's


def _is_kept(event: dict[str, Any]) -> bool:
    return event.get("name") not in ("process_name", "process_sort_index")


@pytest.mark.parametrize("base", ["x", -1, 1.5, 1 << 80])
def test_a_wrong_base_of_times_is_an_error(base: object, tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", [STEP], baseTimeNanoseconds=base)
    with pytest.raises(TraceError, match=r"rank0.json: baseTimeNanoseconds is"):
        merge(tmp_path)


def test_a_merge_that_fails_leaves_nothing(tmp_path: Path) -> None:
    _two_hosts(tmp_path)
    write(tmp_path / "rank1.json", [STEP | {"ts": "x"}], distributedInfo={"rank": 5})
    assert main(["trace", "merge", str(tmp_path)]) == 1
    assert not list(tmp_path.glob("*merged.json*"))


# --- around a run -----------------------------------------------------------------------------

WRITES = """
import sys, pathlib
folder = sys.argv[-1]
assert sys.argv[-4:-1] == ["--muon-trace-steps", "5:7", "--muon-trace-dir"]
pathlib.Path(folder).mkdir(exist_ok=True)
for name in ("rank0", "rank1"):
    source = pathlib.Path(sys.argv[1]) / f"{name}.json.gz"
    (pathlib.Path(folder) / source.name).write_bytes(source.read_bytes())
"""


def test_run_gives_the_command_its_flags_and_reports(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["trace", "run", "--steps", "5:7", "--folder", str(tmp_path / "new")]
    command = [sys.executable, "-c", WRITES, str(PAIR / "muon")]
    assert main([*words, *command]) == 0
    text = capfd.readouterr().out
    assert "merged.stage0.json.gz: ranks 0, 1" in text and "reduce_scatter fp32" in text
    with pytest.raises(SystemExit):
        main([*words, *command])
    assert "give a new or empty folder" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [("raise SystemExit(7)", 7, ""), ("pass", 1, "there is no such file or folder")],
)
def test_run_has_the_commands_status_or_an_error_without_traces(
    code: str, status: int, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["trace", "run", "--steps", "5", "--folder", str(tmp_path / "new")]
    assert main([*words, "--", sys.executable, "-c", code]) == status
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("steps", ["0", "7:5", "x", "1:2:3", "-1", "5:"])
def test_run_refuses_steps_that_are_none(
    steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "run", f"--steps={steps}", "--folder", str(tmp_path / "new"), "true"])
    assert "must be FIRST:LAST or one number" in capsys.readouterr().err
