"""examples/bench/timeline.py: lanes for what each row of ``bench step`` really has."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[3] / "examples" / "bench" / "timeline.py"


def _timeline() -> Any:
    """The example as a module; its folder is not on the path."""
    spec = importlib.util.spec_from_file_location("timeline", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


timeline = _timeline()
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def event(name: str, begin_us: float, us: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": begin_us, "dur": us}


ADAMW = [
    event("Optimizer.step#FusedAdam.step", 1000, 500),
    event("params/gather/collective", 1600, 10),
    event("params/gather/wait", 1700, 300),
]
PAPER = [
    event("Optimizer.step#MuonOverFusedAdam.step", 1000, 900),
    event("muon/adamw", 1000, 100),
    event("muon/dp_gather/collective", 1100, 10),
    event("muon/dp_gather/wait", 1150, 50),
    event("muon/tp_gather/collective", 1200, 200),  # blocks, so there is no wait
    event("muon/newton_schulz", 1400, 300),
]
OURS = [
    event("muon/gather/collective", 3000, 10),
    event("muon/gather/collective", 2000, 10),
    event("muon/gather/wait", 2100, 50),
    event("muon/gather/wait", 3500, 100),
    event("muon/newton_schulz", 2200, 800),
    {"ph": "M", "name": "process_name"},
    event("aten::mm", 0, 9000),
]


def test_adamws_row_has_a_lane_for_its_step_and_for_its_parameters() -> None:
    assert timeline.lanes(ADAMW) == {
        "FusedAdam.step": [(0.0, 0.5)],
        "parameters on the wire": [(pytest.approx(0.6), pytest.approx(0.4))],
    }


def test_the_papers_row_has_the_lanes_of_its_two_gathers() -> None:
    assert timeline.lanes(PAPER) == {
        "AdamW": [(0.0, pytest.approx(0.1))],
        "Newton-Schulz": [(pytest.approx(0.4), pytest.approx(0.3))],
        "DP gather on the wire": [(pytest.approx(0.1), pytest.approx(0.1))],
        "TP gather on the wire": [(pytest.approx(0.2), pytest.approx(0.2))],
    }


def test_a_collective_is_on_the_wire_until_it_has_been_waited_for() -> None:
    lanes = timeline.lanes(OURS)
    assert list(lanes) == ["Newton-Schulz", "gather on the wire"]
    assert lanes["gather on the wire"] == [
        (0.0, pytest.approx(0.15)),
        (1.0, pytest.approx(0.6)),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: TRACE.json, OUT.png"),
        (["no.json", "x.png"], "no.json is no trace of a step: FileNotFoundError"),
        (["empty.json", "x.png"], "there is no step of an optimizer in it"),
        (["list.json", "x.png"], "list.json is no trace of a step: TypeError"),
        (["text.json", "x.png"], "text.json is no trace of a step: JSONDecodeError"),
        (["adamw.json", "no/x.png"], "there is no folder no"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"empty": '{"traceEvents": []}', "list": "[]", "text": "no"}
    for name, text in {**texts, "adamw": json.dumps({"traceEvents": ADAMW})}.items():
        Path(f"{name}.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        timeline.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_help_says_what_a_trace_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        timeline.main(["--help"])
    assert ended.value.code == 0 and "bench step --traces" in capsys.readouterr().out


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is an extra")
@pytest.mark.parametrize("row", [ADAMW, PAPER, OURS], ids=["adamw", "paper", "ours"])
def test_every_row_is_drawn(row: list[dict[str, Any]], tmp_path: Path) -> None:
    trace, out = tmp_path / "row.json.gz", tmp_path / "row.svg"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": row}).encode()))
    timeline.main([str(trace), str(out)])
    for lane in timeline.lanes(row):
        assert f"<!-- {lane} -->" in out.read_text()
