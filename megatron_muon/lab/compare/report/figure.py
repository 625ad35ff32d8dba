"""The picture of ``megatron-muon compare``; it imports matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_muon.lab.compare.compared import Compared

_COLORS = {"adamw": "#d1495b", "muon": "#0b6e4f"}
_NAMES = {"adamw": "AdamW", "muon": "Muon"}
_WIDTH = 0.38  # of a bar, of two beside each other


def draw(compared: Sequence[Compared], path: Path) -> None:
    """Draw bars for each topology: a step with the optimizer's part, and bytes with the exchange.

    Args:
        compared: in the order of the topologies.
        path: path of the file; its suffix selects the format.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    times, sent = figure.subplots(1, 2)
    for number, name in enumerate(_NAMES):
        ones = [getattr(each, name) for each in compared]
        steps = [(one.optimizer_ms, one.step_ms - one.optimizer_ms) for one in ones]
        _bars(times, number, name, steps, "optimizer")
        counts = [(one.exchange / 1e6, one.megatrons / 1e6) for one in ones]
        _bars(sent, number, name, counts, "exchange")
    for axes, label in ((times, "ms of a step"), (sent, "MB that all ranks send in a step")):
        axes.set_xticks(range(len(compared)), [str(each.topology) for each in compared])
        axes.set_ylabel(label)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def _bars(
    axes: Axes, number: int, name: str, parts: Sequence[tuple[float, float]], inner: str
) -> None:
    places = [at + (number - 0.5) * _WIDTH for at in range(len(parts))]
    low, high = ([part[which] for part in parts] for which in (0, 1))
    label = f"{_NAMES[name]}, {inner}"
    axes.bar(places, low, _WIDTH, color=_COLORS[name], label=label if any(low) else None)
    axes.bar(places, high, _WIDTH, bottom=low, color=_COLORS[name], alpha=0.35, label=_NAMES[name])
