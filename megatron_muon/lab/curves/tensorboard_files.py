"""Loss curves in TensorBoard's event files, read by the package that writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_muon.lab.curves.curve import CurveError, Points

PREFIX = "events.out.tfevents."


def has_events(path: Path) -> bool:
    """Whether a path is an event file, or a folder with one in it or below it."""
    if path.is_dir():
        return next(path.rglob(f"{PREFIX}*"), None) is not None
    return path.name.startswith(PREFIX)


def read_events(path: Path) -> dict[str, Points]:
    """The scalars of an event file, or of all files of a folder, by tag.

    Args:
        path: the file or the folder; each folder with event files below it is one part of the run.

    Returns:
        (step, value) by tag, in the order of the files' names: a resumed run's later file wins.

    Raises:
        CurveError: tensorboard is not installed, or a file is damaged.
    """
    accumulators = _accumulators()
    folders = [path]
    if path.is_dir():
        folders = sorted({file.parent for file in path.rglob(f"{PREFIX}*")})
    by_tag: dict[str, list[tuple[float, float]]] = {}
    for folder in folders:
        try:
            events = accumulators.EventAccumulator(
                str(folder), {accumulators.SCALARS: 0, accumulators.TENSORS: 1}
            ).Reload()
            for tag in events.Tags()[accumulators.SCALARS]:
                points = [(float(each.step), float(each.value)) for each in events.Scalars(tag)]
                by_tag.setdefault(tag, []).extend(points)
        except Exception as error:  # its readers raise errors of several packages
            raise CurveError(f"{folder}: TensorBoard cannot read it: {error}") from error
    if not by_tag:
        raise CurveError(f"{path}: no scalar is in its event files")
    return {tag: tuple(points) for tag, points in by_tag.items()}


def _accumulators() -> Any:
    try:
        from tensorboard.backend.event_processing import event_accumulator
    except ImportError as error:
        raise CurveError("TensorBoard's files need tensorboard: pip install tensorboard") from error
    return event_accumulator
