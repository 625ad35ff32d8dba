"""The loss curves of two runs in one figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

# blue and vermilion of Okabe and Ito, which differ to every kind of colour vision
COLOURS = {"Muon": "#0072b2", "AdamW": "#d55e00"}
LINES = {"Muon": "-", "AdamW": "--"}
MARKERS = {"Muon": "o", "AdamW": "s"}


def plot_losses(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Validation loss bold with markers, training loss light, both over steps; writes a
    PNG.
    """
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    last, least = [], []
    for name, run in runs.items():
        steps, losses = zip(*run["curve"]["train"], strict=True)
        axes.plot(
            steps,
            losses,
            LINES[name],
            color=COLOURS[name],
            alpha=0.3,
            lw=1,
            label=f"{name}, training",
        )
        least.append(min(losses))
        steps, losses = zip(*run["curve"]["validation"], strict=True)
        label = f"{name}, validation (lr {run['figures']['lr']:g}): {losses[-1]:.3f}"
        axes.plot(
            steps,
            losses,
            LINES[name],
            color=COLOURS[name],
            lw=2.5,
            marker=MARKERS[name],
            ms=5,
            label=label,
        )
        axes.axhline(losses[-1], color=COLOURS[name], lw=0.8, ls=":")
        last.append(losses[-1])
    # The fall from ln 256 in the first steps would flatten all that follows.
    early = min(
        loss for run in runs.values() for _, loss in run["curve"]["validation"][1:2]
    )
    axes.set_ylim(min(least) - 0.05, max(early, min(last)) + 0.6)
    axes.set_xlim(left=0)
    sizes = next(iter(runs.values()))["topology"]
    topology = " x ".join(f"{name.upper()}{size}" for name, size in sizes.items())
    axes.set_title(f"Byte-level GPT on the standard library's source, {topology}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
