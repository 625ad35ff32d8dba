"""The lines of a run: the numbers of each row, from the sums of all ranks, in a file of
JSON.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_muon.mcore.watching.rows import SUMS, Table

FORMAT = 1
_OF_UPDATES = ("update_rms", "cosine")
Record = dict[str, Any]
Numbers = Mapping[str, float]


class Lines:
    """Appends records to a file, each as one line in one write; makes its folder."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            if file.tell() > 0:
                file.seek(-1, 2)
                # the run before was killed in the middle of a line
                if file.read() != b"\n":
                    file.write(b"\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record."""
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
        line = text.encode() + b"\n"
        with self._path.open("ab", buffering=0) as file:
            end = file.tell()
            if file.write(line) != len(line):  # a disk that is full takes a part
                file.truncate(end)
                raise OSError(errno.ENOSPC, "no space for a whole line")


def start_record(table: Table, **more: Any) -> Record:
    """The first line of a run, with what is the same in all its steps."""
    return {
        "kind": "start",
        "format": FORMAT,
        **more,
        "ranks": table.ranks,
        "rows": {row: _all_short(about) for row, about in table.about.items()},
    }


def step_record(
    table: Table, totals: Sequence[float], maxima: Sequence[float], **more: Any
) -> Record:
    """The line of one logging step; a number that is not finite is null.

    ``totals`` is the message, added up over all ranks. ``maxima`` are the largest
    logits of all ranks; -inf where an attention did not run.
    """
    record: Record = {"kind": "step", **more}
    for kind, numbers_of in _NUMBERS.items():
        for row in table.names[kind]:
            elements = table.about[row]["elements"] if kind == "muon" else 0.0
            numbers = numbers_of(table.sums(totals, kind, row), elements)
            for name in _OF_UPDATES if kind == "muon" and table.adapts else ():
                numbers.pop(name, None)
            if numbers:
                record.setdefault(kind, {})[row] = _all_short(numbers)
    for row, largest in zip(table.names["logits"], maxima, strict=True):
        if largest != -math.inf:
            record.setdefault("logits", {})[row] = {"max_logit": _short(largest)}
    return record


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """``(muon_NUMBER/ROW, value)`` of each number; TensorBoard and W&B group them by
    number.
    """
    for kind in SUMS:
        for row, numbers in record.get(kind, {}).items():
            for name, value in numbers.items():
                if value is not None:
                    yield f"muon_{name}/{row}", value


def _of_muon(sums: Numbers, row_elements: float) -> dict[str, float]:
    """The numbers of a row of matrices; without the directions' where no matrix has a
    gradient.
    """
    elements = sums["elements"]
    numbers = {
        "weight_rms": _root(sums["weight_squares"], elements),
        "momentum_norm": _root(sums["momentum_squares"] * row_elements, elements),
        "gradient_norm": _root(sums["gradient_squares"] * row_elements, elements),
        "moved": _ratio(sums["moved"], sums["matrices"]),
    }
    if not sums["moved"]:
        return numbers
    moved_elements = elements * _ratio(sums["moved_elements"], sums["home_elements"])
    lengths = math.sqrt(max(sums["gradient_squares"] * sums["update_squares"], 0.0))
    return {
        "update_rms": _root(sums["update_squares"], moved_elements),
        **numbers,
        "cosine": _ratio(sums["gradient_updates"], lengths),
    }


def _of_adamw(sums: Numbers, _: float) -> dict[str, float]:
    return {
        "weight_rms": _root(sums["weight_squares"], sums["elements"]),
        "gradient_rms": _root(sums["gradient_squares"], sums["elements"]),
    }


def _of_layer(sums: Numbers, _: float) -> dict[str, float]:
    """Empty where no forward pass was seen, as inside a captured graph."""
    elements = sums["elements"]
    return {"output_rms": _root(sums["output_squares"], elements)} if elements else {}


_NUMBERS = {"muon": _of_muon, "adamw": _of_adamw, "layers": _of_layer}


def _ratio(sum_: float, count: float) -> float:
    return sum_ / count if count else math.nan


def _root(squares: float, count: float) -> float:
    mean = _ratio(squares, count)
    return math.sqrt(mean) if mean >= 0 else math.nan


def _short(value: float) -> float | None:
    """Six digits; None where it is not finite, which JSON cannot say."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _all_short(numbers: Numbers) -> dict[str, float | None]:
    """The same with short floats; counts stay as they are."""
    return {k: _short(v) if isinstance(v, float) else v for k, v in numbers.items()}
