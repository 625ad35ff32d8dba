"""Layers by steps, a heat map for each number; it imports matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy
from matplotlib.figure import Figure

from megatron_muon.lab.watch.history import History
from megatron_muon.lab.watch.kinds import by_kind

# Kind of row, number, title, and the start record's number that divides it.
_PANELS = (
    ("muon", "update_rms", "update RMS / promised", "promised"),
    ("muon", "weight_rms", "weight RMS", ""),
    ("muon", "spectral_norm", "spectral norm of the weight", ""),
    ("muon", "momentum_norm", "momentum norm, log10", ""),
    ("muon", "orthogonality_error", "orthogonality error of the direction", ""),
    ("muon", "cosine", "cosine of update and gradient", ""),
    ("muon", "effective_rank", "effective rank / full", "full_rank"),
    ("layers", "output_rms", "RMS of the layer's output", ""),
    ("logits", "max_logit", "largest attention logit", ""),
)
_COLUMNS = 4


def draw(history: History, path: Path) -> None:
    """Draw every number of which a step has some.

    Args:
        history: the records, at least one step.
        path: path of the file; its suffix selects the format.

    Raises:
        OSError: the file cannot be written.
    """
    panels = [(panel, _rows(history, panel[0], panel[1])) for panel in _PANELS]
    panels = [(panel, rows) for panel, rows in panels if rows]
    lines = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(4.2 * _COLUMNS, 3.6 * lines), dpi=75, layout="constrained")
    all_axes = figure.subplots(lines, _COLUMNS, squeeze=False).flatten()
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    for axes, ((_, name, title, divisor), rows) in zip(all_axes, panels, strict=False):
        divisors = getattr(history.start, divisor) if divisor else {}
        values = numpy.array(
            [
                numpy.array(history.values(column)) / (divisors.get(column[1]) or 1.0)
                for _, column in rows
            ]
        )
        values[~numpy.isfinite(values)] = numpy.nan
        if name == "momentum_norm":
            values = numpy.log10(numpy.where(values > 0, values, numpy.nan))
        image = axes.imshow(values, aspect="auto", interpolation="nearest", origin="upper")
        figure.colorbar(image, ax=axes)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        _name_steps(axes, history)
        _name_rows(axes, [label for label, _ in rows])
    figure.savefig(path)


def _rows(history: History, kind: str, name: str) -> list[tuple[str, tuple[str, str, str]]]:
    """``(kind of matrix, column)`` of each row, kind by kind, in the order of layers."""
    return [
        (label, (kind, row, name))
        for label, rows in by_kind(history.rows(kind)).items()
        for _, row in rows
        if (kind, row, name) in history.columns
    ]


def _name_steps(axes: object, history: History) -> None:
    steps = [step.step for step in history.steps]
    places = sorted({round(at * (len(steps) - 1) / 4) for at in range(5)})
    axes.set_xticks(places, [str(steps[at]) for at in places], fontsize=7)  # type: ignore[attr-defined]


def _name_rows(axes: object, labels: Sequence[str]) -> None:
    """A label in the middle of each kind, and a line between two kinds."""
    kinds = list(dict.fromkeys(labels))
    places = [
        sum(at for at, label in enumerate(labels) if label == kind) / labels.count(kind)
        for kind in kinds
    ]
    leaves = [kind.rpartition(".")[2] for kind in kinds]
    short = [
        leaf if leaves.count(leaf) == 1 else ".".join(kind.split(".")[-2:])
        for kind, leaf in zip(kinds, leaves, strict=True)
    ]
    axes.set_yticks(places, short, fontsize=8)  # type: ignore[attr-defined]
    for at, label in enumerate(labels[1:]):
        if label != labels[at]:
            axes.axhline(at + 0.5, color="white", linewidth=0.8)  # type: ignore[attr-defined]
