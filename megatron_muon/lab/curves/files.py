"""Loss curves in files: TensorBoard's, and Megatron's log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_muon.lab.curves.lead import Curve, curve
from megatron_muon.lab.outputs import CommandError
from megatron_muon.mcore.checkpoint.files import open_regular

KINDS = ("train", "validation", "other")  # other: text from elsewhere
MOST = 1 << 28  # bytes of a file
MOST_LINE = 1 << 20  # characters of a line
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
    except (OSError, ValueError) as error:
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
            "with 'lm loss', a folder event files of TensorBoard's; --tag KIND=NAME "
            "names another loss"
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
    """Add the losses of a log, or the scalars of an event file, by their names."""
    is_events = path.name.startswith(_EVENTS)
    with open_regular(path) as file:
        content = b"" if is_events else file.read(MOST + 1)
    if max(len(content), path.stat().st_size) > MOST:
        raise ValueError(f"it has more than {MOST >> 20} MiB")
    if is_events:
        _read_events(path, columns)
    for line in content.decode("utf-8", "replace").splitlines():
        if match := _TRAIN.search(line[:MOST_LINE]):
            step, name, loss = match.groups()
        elif match := _EVALUATED.search(line[:MOST_LINE]):
            which, step, name, loss = match.groups()
            name = f"{name} validation{which}"
        else:
            continue
        columns.setdefault(name, []).append((float(step), float(loss)))


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
