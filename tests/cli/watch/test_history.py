"""Lines of a run are read in bounded memory, and nothing in them is trusted."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from megatron_muon.lab.watch import history as history_module
from megatron_muon.lab.watch.history import MOST_LINE, History, read

ROW = "decoder.layers.0.mlp.linear_fc1"
COLUMN = ("muon", ROW, "update_rms")


def start(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "kind": "start",
        "format": 1,
        "version": "0.1.0",
        "time": 1.0,
        "interval": 1,
        "ranks": 2,
        "muon_share": 0.9,
        "newton_schulz_planned": 1.1,
        "rows": {ROW: {"elements": 8, "matrices": 1, "promised_rms": 0.2, "full_rank": 2.0}},
    }
    return {**made, **changes}


def step(number: int, update: float | None = 0.18, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "kind": "step",
        "step": number,
        "time": 2.0,
        "lr": 0.01,
        "muon": {ROW: {"update_rms": update}},
        "newton_schulz_ms": {"mean": 1.0, "max": 1.1, "rank": 0},
    }
    return {**made, **changes}


def lines(*records: object) -> bytes:
    return b"".join(
        (record if isinstance(record, bytes) else json.dumps(record).encode()) + b"\n"
        for record in records
    )


def test_steps_come_back() -> None:
    history = read([lines(start(), step(1, 0.1), step(2, None), step(3, muon={}))])
    assert (history.start.ranks, history.start.muon_share, history.fault_count) == (2, 0.9, 0)
    assert history.start.promised == {ROW: 0.2} and history.start.full_rank == {ROW: 2.0}
    first, second, third = history.values(COLUMN)
    assert first == 0.1 and math.isinf(second) and math.isnan(third)
    assert [(each.step, each.lr) for each in history.steps] == [(1, 0.01), (2, 0.01), (3, 0.01)]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_bytes_may_come_in_any_parts(size: int) -> None:
    data = lines(start(), step(1), step(2))
    history = read(data[at : at + size] for at in range(0, len(data), size))
    assert [each.step for each in history.steps] == [1, 2] and not history.faults


def test_a_restart_replaces_the_steps_that_it_repeats() -> None:
    history = read(
        [lines(start(), step(1, 0.1), step(2, 0.2), start(), step(2, 0.3), step(3, 0.4))]
    )
    assert [each.step for each in history.steps] == [1, 2, 3]
    assert history.values(COLUMN) == [0.1, 0.3, 0.4]


DAMAGED = {
    "cut": (b'{"kind":"st', "no JSON"),
    "bytes": (b"\xff\x00\xfe", "no JSON"),
    "nan": (b'{"kind":"step","step":1,"muon":{"a":{"b":NaN}}}', "NaN is no number"),
    "list": (b"[1, 2]", "neither the start"),
    "kind": (b'{"kind":"end"}', "neither the start"),
    "no step": ({"kind": "step"}, "step is None, no count"),
    "negative": (step(-1), "step is -1, no count"),
    "huge step": (step(1 << 60), "no count"),
    "text": (step(1, "0.1"), "update_rms' is '0.1', no number"),  # type: ignore[arg-type]
    "bool": (step(1, True), "no number"),
    "large": (step(1, 10**400), "too large"),
    "digits": (b'{"kind":"step","step":' + b"9" * 5000 + b"}", ""),
    "infinite": (b'{"kind":"step","step":1,"muon":{"a":{"b":1e999}}}', "too large"),
    "rows": (step(1, muon=[1]), "'muon' is no object"),
    "numbers": (step(1, muon={"a": 3}), "'a' is no object"),
    "name": (step(1, muon={"a" * 301: {}}), "a name of 301 characters"),
    "deep": (b"[" * 200_000, "nested too deeply"),
    "times": (step(1, newton_schulz_ms={"mean": 1}), "'max' is None"),
    "lr": (step(1, lr="x"), "'lr' is 'x'"),
    "format": (start(format=2), "of format 2; this command reads 1"),
    "long": (b'"' + b"a" * MOST_LINE + b'"', "longer than"),
}


@pytest.mark.parametrize("which", DAMAGED)
def test_a_damaged_line_is_named_and_the_others_are_read(which: str) -> None:
    line, why = DAMAGED[which]
    history = read([lines(start(), step(1), line, step(2))])
    (fault,) = history.faults
    assert fault.line == 3 and why in fault.why and len(fault.why) < 400
    assert [each.step for each in history.steps] == [1, 2]


def test_a_line_without_an_end_is_named_only_at_the_end_of_the_file() -> None:
    history = History()
    history.feed(lines(start(), step(1)) + b'{"kind":')
    assert not history.faults
    history.end()
    assert [(fault.line, fault.why[:7]) for fault in history.faults] == [(3, "cut off")]


def test_a_long_line_takes_no_memory() -> None:
    history = History()
    history.feed(lines(start(), step(1)))
    for _ in range(5):
        history.feed(b"a" * (MOST_LINE // 2))
        assert len(history._rest) <= MOST_LINE
    history.feed(b"\n" + lines(step(2)))
    assert [each.step for each in history.steps] == [1, 2] and history.fault_count == 1


def test_many_steps_are_thinned_and_the_newest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MOST_NUMBERS", 16)
    history = read([lines(start(), *(step(number) for number in range(1, 200)))])
    assert len(history.steps) <= 17 and history.stride > 1
    kept = [each.step for each in history.steps]
    assert kept[-1] == 199 and kept == sorted(set(kept)) and kept[0] == 1


def test_the_number_of_names_and_faults_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MOST_COLUMNS", 3)
    many = step(2, muon={str(row): {"update_rms": 1.0} for row in range(4)})
    history = read([lines(start(), step(1), many, step(3))])
    assert "more than 3 different numbers" in history.faults[0].why and len(history.columns) == 1
    history = read([lines(*[b"x"] * 100)])
    assert history.fault_count == 100 and len(history.faults) == history_module.MOST_FAULTS
