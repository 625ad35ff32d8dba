"""A run's records in bounded memory, read from lines that are not trusted."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron_muon.watching.line_format import FORMAT, KINDS

MOST_LINE = 1 << 24  # bytes of a line
MOST_NAME = 300  # characters of a row's or number's name
MOST_COLUMNS = 1 << 18  # different numbers of a run
MOST_NUMBERS = 1 << 22  # numbers that are kept; then every second step is dropped
MOST_FAULTS = 20  # that are kept word for word

Column = tuple[str, str, str]  # kind of row, row, number: ("muon", "decoder.…fc1", "update_rms")


class LineError(ValueError):
    """A line is no record."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that is no record, and why."""

    line: int
    why: str


@dataclass(frozen=True, slots=True)
class NewtonSchulzTimes:
    """Milliseconds of Newton-Schulz: on the mean rank, and on the slowest one and its number."""

    mean: float
    max: float
    rank: int


@dataclass(frozen=True, slots=True)
class Step:
    """One logging step; its numbers are in the order of ``History.columns``."""

    step: int
    lr: float | None
    times: NewtonSchulzTimes | None
    numbers: array[float]


@dataclass(slots=True)
class Start:
    """The first line of a run; the promised sizes and full ranks are by row."""

    ranks: int = 0
    muon_share: float | None = None
    planned: float | None = None
    logit_threshold: float | None = None  # of the run's own clip of logits
    promised: dict[str, float] = field(default_factory=dict)
    full_rank: dict[str, float] = field(default_factory=dict)


class History:
    """The records so far. A restart from a checkpoint replaces the steps that it repeats.

    Attributes:
        start: what the last start of a run says.
        columns: the place of each number in a step.
        steps: the steps, in order.
        stride: one of so many steps is kept.
        faults: the first lines that are no records; ``fault_count`` counts all.
    """

    def __init__(self) -> None:
        self.start = Start()
        self.columns: dict[Column, int] = {}
        self.steps: list[Step] = []
        self.stride = 1
        self.faults: list[Fault] = []
        self.fault_count = 0
        self._line = 0
        self._kept = 0
        self._seen = 0
        self._rest = b""
        self._skips = False  # the rest of a line that is too long

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the file, which may end in the middle of a line."""
        *whole, rest = (self._rest + data).split(b"\n")
        for line in whole:
            self._line += 1
            if not self._skips:
                self._take(line)
            self._skips = False
        if len(rest) > MOST_LINE and not self._skips:
            self._skips = True
            self._note(self._line + 1, f"longer than {MOST_LINE} bytes")
        self._rest = b"" if self._skips else rest

    def end(self) -> None:
        """The file ends here: what is left is a line that was cut off."""
        if self._rest:
            self._note(self._line + 1, "cut off: it does not end with a line break")
            self._rest = b""

    def values(self, column: Column) -> list[float]:
        """A number in each step: NaN where a step lacks it, Inf where it was not finite."""
        place = self.columns.get(column)
        return [
            math.nan if place is None or place >= len(step.numbers) else step.numbers[place]
            for step in self.steps
        ]

    def rows(self, kind: str) -> list[str]:
        """The rows of a kind, in the order of the file."""
        return list(dict.fromkeys(row for of, row, _ in self.columns if of == kind))

    def _take(self, line: bytes) -> None:
        try:
            if len(line) > MOST_LINE:
                raise LineError(f"longer than {MOST_LINE} bytes")
            record = _parsed(line)
            if record["kind"] == "start":
                self.start = _start(record)
            else:
                self._append(record)
        except LineError as error:
            self._note(self._line, str(error))

    def _note(self, line: int, why: str) -> None:
        self.fault_count += 1
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(Fault(line, why))

    def _append(self, record: Mapping[str, Any]) -> None:
        step = _integer(record, "step")
        numbers = dict(_numbers(record))
        lr, times = _optional(record, "lr"), _times(record)
        new = [column for column in numbers if column not in self.columns]
        if len(self.columns) + len(new) > MOST_COLUMNS:
            raise LineError(f"more than {MOST_COLUMNS} different numbers in this file")
        for column in new:
            self.columns[column] = len(self.columns)
        values = array("d", [math.nan]) * len(self.columns)
        for column, value in numbers.items():
            values[self.columns[column]] = value
        while self.steps and self.steps[-1].step >= step:
            self._kept -= len(self.steps.pop().numbers)
        self._seen += 1
        if self.stride > 1 and len(self.steps) > 1 and self._seen % self.stride:
            self._kept -= len(self.steps.pop().numbers)  # only the newest is kept besides
        self.steps.append(Step(step, lr, times, values))
        self._kept += len(values)
        if self._kept > MOST_NUMBERS and len(self.steps) > 2:
            self._thin()

    def _thin(self) -> None:
        self.stride *= 2
        self.steps = [*self.steps[:-1:2], self.steps[-1]]
        self._kept = sum(len(step.numbers) for step in self.steps)


def read(chunks: Iterable[bytes]) -> History:
    """The records of a whole file."""
    history = History()
    for chunk in chunks:
        history.feed(chunk)
    history.end()
    return history


def _parsed(line: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise LineError(f"{constant} is no number of JSON")

    try:
        record = json.loads(line, parse_constant=refuse)
    except LineError:
        raise
    except RecursionError:
        raise LineError("no JSON: nested too deeply") from None
    except ValueError as error:  # also of bytes that are no UTF-8
        raise LineError(f"no JSON: {error}") from None
    if not isinstance(record, dict) or record.get("kind") not in ("start", "step"):
        raise LineError("neither the start of a run nor a step")
    return record


def _start(record: Mapping[str, Any]) -> Start:
    if record.get("format") != FORMAT:
        raise LineError(f"of format {_said(record.get('format'))}; this command reads {FORMAT}")
    start = Start(
        _integer(record, "ranks"),
        _optional(record, "muon_share"),
        _optional(record, "newton_schulz_planned"),
        _optional(record, "logit_threshold"),
    )
    for row, about in _mapping(record.get("rows", {}), "rows"):
        given = dict(_mapping(about, row))
        start.promised[row] = _float(given.get("promised_rms"), "promised_rms")
        start.full_rank[row] = _float(given.get("full_rank"), "full_rank")
    return start


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[Column, float]]:
    for kind in KINDS:
        for row, numbers in _mapping(record.get(kind, {}), kind):
            for name, value in _mapping(numbers, row):
                yield (kind, row, name), math.inf if value is None else _float(value, name)


def _times(record: Mapping[str, Any]) -> NewtonSchulzTimes | None:
    given = record.get("newton_schulz_ms")
    if given is None:
        return None
    about = dict(_mapping(given, "newton_schulz_ms"))
    mean, most = _float(about.get("mean"), "mean"), _float(about.get("max"), "max")
    return NewtonSchulzTimes(mean, most, _integer(about, "rank"))


def _mapping(value: object, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise LineError(f"{_said(name)} is no object of JSON")
    for key, entry in value.items():
        if len(key) > MOST_NAME:
            raise LineError(f"a name of {len(key)} characters in {_said(name)}")
        yield key, entry


def _integer(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise LineError(f"{name} is {_said(value)}, no count")
    return value


def _optional(record: Mapping[str, Any], name: str) -> float | None:
    return None if record.get(name) is None else _float(record[name], name)


def _float(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise LineError(f"{_said(name)} is {_said(value)}, no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise LineError(f"{_said(name)} is too large for a number")
    return number


def _said(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
