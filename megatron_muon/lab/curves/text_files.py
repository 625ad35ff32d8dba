"""Loss curves in text: Megatron's log, CSV, JSON lines, and the quickstart's JSON."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_muon.files.regular import open_regular
from megatron_muon.lab.curves.curve import CurveError, Points

MOST = 1 << 28  # bytes of a file
MOST_LINE = 1 << 20  # characters of a line
STEPS = ("step", "iteration", "iter", "global_step", "_step")
_NUMBER = r"([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))"
# Lines of Megatron's training_log and evaluate_and_print_results.
_TRAIN = re.compile(rf"iteration\s+(\d+)/\s*\d+ \|.{{0,2000}}?\| (\S*lm loss): {_NUMBER} \|")
_EVALUATED = re.compile(
    rf"(validation|test) loss at iteration (\d+)(?: on (\w+) set)? \| (\S*lm loss) value: {_NUMBER}"
)

Columns = dict[str, list[tuple[float, float]]]


def read_text(path: Path) -> dict[str, Points]:
    """Every column of numbers over steps in a file, by its name.

    Args:
        path: a Megatron log, a CSV file, JSON lines, or a quickstart's JSON file.

    Returns:
        (step, value) in the order of the file, by name. A CSV of TensorBoard's has one column
        ``Value``, which takes the file's name.

    Raises:
        CurveError: the file cannot be read, is too large, or has no such column.
    """
    lines = _lines(path)
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        columns = _json_columns(path, lines)
    elif _step_column(first) is not None:
        columns = _csv_columns(path, lines)
    else:
        columns = _log_columns(lines)
    if not columns:
        raise CurveError(
            f"{path}: no losses are in it. Megatron's log has lines with 'lm loss', CSV and JSON "
            f"lines have one of the columns {', '.join(STEPS)}"
        )
    return {name: tuple(points) for name, points in columns.items()}


def _lines(path: Path) -> list[str]:
    try:
        with open_regular(path) as file:
            content = file.read(MOST + 1)
    except OSError as error:
        raise CurveError(f"{path}: it cannot be read: {error}") from error
    if len(content) > MOST:
        raise CurveError(f"{path}: it has more than {MOST >> 20} MiB")
    return content.decode("utf-8", "replace").splitlines()


def _step_column(header: str) -> str | None:
    names = next(csv.reader([header]), []) if len(header) < MOST_LINE and "," in header else []
    return next((name for name in names if name.strip().lower() in STEPS), None)


def _csv_columns(path: Path, lines: list[str]) -> Columns:
    columns: Columns = {}
    try:
        for row in csv.DictReader(line for line in lines if line.strip()):
            _add_row(columns, row)
    except csv.Error as error:
        raise CurveError(f"{path}: it is no CSV: {error}") from error
    if "Value" in columns:  # TensorBoard's download: Wall time, Step, Value
        columns = {path.stem: columns["Value"]}
    return columns


def _json_columns(path: Path, lines: list[str]) -> Columns:
    columns: Columns = {}
    try:
        whole = json.loads("\n".join(lines)) if _is_one_object(lines) else None
        if isinstance(whole, dict) and isinstance(whole.get("curve"), dict):
            return _quickstart_columns(whole["curve"])
        for number, line in enumerate(lines, 1):
            if line.strip():
                _add_line(columns, line[:MOST_LINE], number)
    except (ValueError, RecursionError) as error:
        raise CurveError(f"{path}: it is no JSON: {error}") from error
    return columns


def _is_one_object(lines: list[str]) -> bool:
    """Whether the whole file may be one object, since its first line alone is none."""
    first = next(line for line in lines if line.strip()).strip()
    return not first.endswith("}") or sum(bool(line.strip()) for line in lines) == 1


def _quickstart_columns(curves: dict[str, Any]) -> Columns:
    columns: Columns = {}
    for name, points in curves.items():
        if not isinstance(points, list):
            continue
        for point in points:
            if not (isinstance(point, list) and len(point) == 2):
                raise ValueError(f"curve {name!r} has a point {str(point)[:60]!r}")
            _add(columns, name, point[0], point[1])
    return columns


def _add_line(columns: Columns, line: str, number: int) -> None:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"line {number} is no object")
    _add_row(columns, row)


def _add_row(columns: Columns, row: dict[str, Any]) -> None:
    by_name = {str(name).strip().lower(): name for name in row}
    step = next((row[by_name[name]] for name in STEPS if name in by_name), None)
    for name, value in row.items():
        if isinstance(name, str) and name.strip().lower() not in STEPS:
            _add(columns, name.strip(), step, value)


def _add(columns: Columns, name: str, step: Any, value: Any) -> None:
    """Adds a point; an empty cell and a text are none, since a row need not have all columns."""
    if isinstance(step, bool) or isinstance(value, bool):
        return
    try:
        point = float(step), float(value)
    except (TypeError, ValueError, OverflowError):
        return
    columns.setdefault(name, []).append(point)


def _log_columns(lines: list[str]) -> Columns:
    columns: Columns = {}
    for name, step, loss in _logged(lines):
        columns.setdefault(name, []).append((step, loss))
    return columns


def _logged(lines: list[str]) -> Iterator[tuple[str, float, float]]:
    for line in lines:
        text = line[:MOST_LINE]
        if match := _TRAIN.search(text):
            yield match[2], float(match[1]), float(match[3])
        elif match := _EVALUATED.search(text):
            which, step, on, name, loss = match.groups()
            if which == "validation" and on != "test":  # the test set is read once, at the end
                yield f"{name} validation", float(step), float(loss)
