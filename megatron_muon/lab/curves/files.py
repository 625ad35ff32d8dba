"""Loss curves in files: TensorBoard's, Megatron's log, CSV, JSON lines, the
quickstart's JSON.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_muon.lab.curves.lead import Curve, curve
from megatron_muon.lab.outputs import CommandError
from megatron_muon.mcore.load_check.files import open_regular

KINDS = ("train", "validation", "other")  # other: text from elsewhere
MOST = 1 << 28  # bytes of a file
MOST_LINE = 1 << 20  # characters of a line
STEPS = ("step", "iteration", "iter", "global_step", "_step")
_EVENTS = "events.out.tfevents."
_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
# Lines of Megatron's training_log and evaluate_and_print_results.
_TRAIN = re.compile(
    rf"iteration\s+(\d+)/\s*\d+ \|.{{0,2000}}?\| (\S{{0,80}}lm loss): {_NUMBER} \|"
)
_EVALUATED = re.compile(
    r"validation(\S{0,80}) loss at iteration (\d+)(?: on validation set)? \| "
    rf"(\S{{0,80}}lm loss) value: {_NUMBER} \|"
)
_NO_LOSS = frozenset("ppl perplexity vs scale scaling aux load balancing".split())
Columns = dict[str, list[tuple[float, float]]]


class CurveError(CommandError):
    """A file holds no loss curve that can be read; the text names the file."""


def read_curves(path: Path, tags: Mapping[str, str]) -> dict[str, Curve]:
    """The loss of each kind in a file, or in the event files of a folder and those
    below it.

    ``tags`` are the names of losses, by kind, where they do not tell by themselves.

    Raises:
        CurveError: the file cannot be read, is too large, or has no loss, or several of
            one kind.
    """
    columns: Columns = {}
    try:
        files = sorted(path.rglob(f"{_EVENTS}*")) if path.is_dir() else [path]
        for file in files:  # of a resumed run the later file wins
            _read(file, columns)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise CurveError(f"{path}: it cannot be read: {error}") from error
    by_kind = {}
    for kind in KINDS:
        names = [name for name in columns if kind_of(name) == kind]
        exact = [name for name in names if name in ("lm loss", "lm loss validation")]
        if kind not in tags and len(names) > 1 and len(exact) != 1:
            raise CurveError(
                f"{path}: {_listed(names)} may be the {kind} loss: --tag {kind}=NAME"
            )
        name = tags.get(kind) or next(iter(exact or names), None)
        if kind in tags and name not in columns:
            raise CurveError(f"{path}: it has no {name!r}, but {_listed(columns)}")
        loss = None if name is None else curve(columns[name])
        # a loss before training alone is no curve
        if loss is not None and loss.steps[-1] > 0:
            by_kind[kind] = loss
    if not by_kind:
        raise CurveError(
            f"{path}: no loss is in it ({_listed(columns)}). Megatron's log has lines "
            "with 'lm loss', CSV and JSON lines one of the columns "
            f"{', '.join(STEPS)}, a folder event files of TensorBoard's; --tag "
            "KIND=NAME names another loss"
        )
    return by_kind


def kind_of(name: str) -> str | None:
    """Which of ``KINDS`` a name means, by the words that Megatron, W&B and the
    quickstart use.

    None is what is no loss over steps, such as ``lm loss validation ppl``.
    """
    words = set(re.sub(r"[\W_]+", " ", name.lower()).split())
    is_other = name.lower().startswith("out-of-distribution")
    if words & _NO_LOSS:
        return None
    if is_other or words & {"ood", "other"}:
        return "other"
    if words & {"validation", "valid", "val", "eval", "evaluation", "test"}:
        return "validation"
    return "train" if words & {"loss", "train", "training"} else None


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name[:80]) for name in names]
    return ", ".join(shown[:12]) + ", …" * (len(shown) > 12)


def _read(path: Path, columns: Columns) -> None:
    """Add each column of numbers over steps of a file, by its name."""
    with open_regular(path) as file:
        content = b"" if path.name.startswith(_EVENTS) else file.read(MOST + 1)
        if max(len(content), path.stat().st_size) > MOST:
            raise ValueError(f"it has more than {MOST >> 20} MiB")
    lines = [
        line[:MOST_LINE] for line in content.decode("utf-8-sig", "replace").splitlines()
    ]
    if path.name.startswith(_EVENTS):
        _read_events(path, columns)
    for row in _rows([line for line in lines if line.strip()], path.stem):
        _add(columns, row)


def _rows(lines: list[str], stem: str) -> Iterator[dict[str, Any]]:
    """The rows of a text file of any kind; ``stem`` names a CSV's column Value."""
    first = next(iter(lines), "")
    names = [name.strip().lower() for name in next(csv.reader([first]), [])]
    if first.lstrip().startswith("{"):
        yield from _objects(lines)
    elif set(STEPS) & set(names):
        for row in csv.DictReader(lines):  # TensorBoard's download has one column Value
            yield {stem if name == "Value" else name: row[name] for name in row}
    else:
        for line in lines:
            if match := _TRAIN.search(line):
                yield {"step": match[1], match[2]: match[3]}
            elif match := _EVALUATED.search(line):
                name = f"{match[3]} validation{match[1]}"
                yield {"step": match[2], name: match[4]}


def _objects(lines: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of JSON lines, or of the quickstart's ``{"curve": {name: [[step, loss],
    ...]}}``.
    """
    try:
        whole = json.loads("\n".join(lines))
    except json.JSONDecodeError:
        whole = {}
    curves = whole.get("curve") if isinstance(whole, dict) else None
    if isinstance(curves, dict):
        for name, points in curves.items():
            for point in points if isinstance(points, list) else []:
                if not (isinstance(point, list) and len(point) == 2):
                    raise ValueError(f"curve {name!r} has a point {str(point)[:60]!r}")
                yield {"step": point[0], name: point[1]}
        return
    for number, line in enumerate(lines, 1):
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is no object")
        yield row


def _add(columns: Columns, row: Mapping[Any, Any]) -> None:
    """Add the numbers of a row; an empty cell and a text are none, since not all rows
    have all.
    """
    by_name = {str(name).strip().lower(): value for name, value in row.items()}
    step = _number(next((by_name[name] for name in STEPS if name in by_name), None))
    for name, cell in row.items():
        value = _number(cell)
        is_loss = isinstance(name, str) and name.strip().lower() not in STEPS
        if is_loss and step is not None and value is not None:
            columns.setdefault(name.strip(), []).append((step, value))


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _read_events(path: Path, columns: Columns) -> None:
    from tensorboard.backend.event_processing import event_accumulator as events

    try:
        read = events.EventAccumulator(
            str(path), {events.SCALARS: 0, events.TENSORS: 1}
        ).Reload()
        for tag in read.Tags()[events.SCALARS]:
            columns.setdefault(tag, []).extend(
                (each.step, each.value) for each in read.Scalars(tag)
            )
    except Exception as error:  # its readers raise errors of several packages
        raise ValueError(f"TensorBoard cannot read {path.name}: {error}") from error
