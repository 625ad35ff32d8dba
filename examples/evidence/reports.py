"""The tables and the picture of convergence.py's figures."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from training import NAMES

from megatron_muon.lab.curves.lead import Curve, Lead, curve, leads

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

COLORS = {"adam": "#d55e00", "muon": "#0072b2"}
LINES = {"adam": "--", "muon": "-"}
# A line below the title of each panel.
PANELS = {
    "as tuned": "160 steps of 32 sequences",
    "QKV fused, gate and up fused": "Muon has one matrix for each weight",
    "QKV split, gate and up split": "Muon has Q, K, V, gate and up as matrices",
    "decay on all parameters": "weight decay also on norms and biases",
    "batch x 4, the same tokens": "40 steps of 128 sequences",
    "batch / 4, the same tokens": "640 steps of 8 sequences",
    "experts": "a mixture of 4 experts in place of the MLP",
    "four times the tokens": "640 steps of 32 sequences",
    "small": "hidden size 64, 2 layers, 80 steps",
    "small, 16 times the tokens": "hidden size 64, 2 layers, 1,280 steps",
    "large": "hidden size 192, 6 layers, 320 steps",
}
# parameters of the layers grow, and the steps with them
SIZES = ("small", "as tuned", "large")


def curves(
    question: dict[str, Any], optimizer: str, kind: str = "validation"
) -> list[Curve]:
    """The loss of each seed over steps."""
    found = [curve(run[kind]) for run in question[optimizer]["runs"]]
    return [each for each in found if each is not None]


def lead(question: dict[str, Any]) -> Lead:
    """The leading ratio at the end of AdamW's runs, over all pairs of seeds."""
    return leads(curves(question, "adam"), curves(question, "muon"), 0.0)[-1]


def tables(tuning: dict[str, Any], found: dict[str, Any]) -> str:
    """In Markdown: the tuning, every question, the fit over sizes."""
    parts = [_tuning_table(tuning), _question_table(found)]
    if "as tuned" in found and "other" in found["as tuned"]["adam"]["runs"][0]:
        parts.append(_other_text(found["as tuned"]))
    if "as tuned" in found:
        parts.append(_smoothing(found["as tuned"]))
    if set(SIZES) <= set(found):
        parts.append(_sizes(found))
    return "\n\n".join(parts)


def _tuning_table(tuning: dict[str, Any]) -> str:
    lines = ["| | tried | found | runs |", "|---|---|---|--:|"]
    for optimizer, name in NAMES.items():
        tried = "; ".join(
            f"`{setting}` {', '.join(f'{value:g}' for value in values)}"
            for setting, values in tuning["tried"][optimizer].items()
        )
        settings = tuning[optimizer]["found"]
        chosen = ", ".join(
            f"{value:g}{'*' * (setting in tuning[optimizer]['at_edge'])}"
            for setting, value in settings.items()
        )
        runs = {str(trial) for trial in tuning[optimizer]["trials"]}
        lines.append(f"| {name} | {tried} | {chosen} | {len(runs)} |")
    return "\n".join(lines)


def _question_table(found: dict[str, Any]) -> str:
    lines = [
        "| question | AdamW: lr | loss | Muon: lr | loss | AdamW − Muon | leading "
        "ratio |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, question in found.items():
        cells = []
        for optimizer in NAMES:
            part = question[optimizer]
            edge = "*" if part["at_edge"] else ""
            cells += [f"{part['lr']:g}{edge}", _spread(_losses(part), "{:.3f}")]
        gap = statistics.fmean(_losses(question["adam"])) - statistics.fmean(
            _losses(question["muon"])
        )
        ratio = lead(question)
        ratios = (
            "never"
            if ratio.ratio is None
            else _spread(ratio.ratios, "{:.2f}", ratio.ratio)
        )
        lines.append(f"| {name} | {' | '.join(cells)} | {gap:+.3f} | {ratios} |")
    return "\n".join(lines)


def _smoothing(question: dict[str, Any]) -> str:
    lines = [
        "| window of smoothed training losses | ratio at 0.8 of the steps | at all |"
    ]
    lines.append("|---|--:|--:|")
    trained = [curves(question, optimizer, "train") for optimizer in NAMES]
    for window in (0.02, 0.1, 0.5):  # as `curves --window`
        *_, most, _, end = leads(*trained, window)
        ratios = (_spread(each.ratios, "{:.2f}", each.ratio) for each in (most, end))
        lines.append(f"| {window:g} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def _losses(part: dict[str, Any]) -> list[float]:
    return [run["loss"] for run in part["runs"]]


def _spread(values: Any, shape: str, middle: float | None = None) -> str:
    center = statistics.fmean(values) if middle is None else middle
    low, high = shape.format(min(values)), shape.format(max(values))
    return f"{shape.format(center)} ({low} to {high})"


def _other_text(question: dict[str, Any]) -> str:
    lines = [
        "| loss after training, as tuned | Python, held out | C headers |",
        "|---|--:|--:|",
    ]
    for optimizer, name in NAMES.items():
        ends = [
            [run[kind][-1][1] for run in question[optimizer]["runs"]]
            for kind in ("validation", "other")
        ]
        lines.append(
            f"| {name} | {' | '.join(_spread(losses, '{:.3f}') for losses in ends)} |"
        )
    return "\n".join(lines)


def _sizes(found: dict[str, Any]) -> str:
    """Fits loss = c · N^-k to three sizes by least squares of logarithms; steps grow
    with N.
    """
    lines = ["| | loss of small, middle, large | exponent k | error of the fit |"]
    lines.append("|---|--:|--:|--:|")
    for optimizer, name in NAMES.items():
        points = [
            (
                math.log(PARAMETERS[size]),
                math.log(statistics.fmean(_losses(found[size][optimizer]))),
            )
            for size in SIZES
        ]
        slope, worst = _fit(points)
        losses = ", ".join(f"{math.exp(loss):.3f}" for _, loss in points)
        lines.append(f"| {name} | {losses} | {-slope:.3f} | {100 * worst:.1f} % |")
    return "\n".join(lines)


# of the layers: 4 h² of attention and 3 h · ffn of a gated MLP, times layers
PARAMETERS = {
    "small": 2 * (4 * 64 * 64 + 3 * 64 * 172),
    "as tuned": 4 * (4 * 128 * 128 + 3 * 128 * 344),
    "large": 6 * (4 * 192 * 192 + 3 * 192 * 512),
}


def _fit(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The slope of a straight line, and the largest distance from it."""
    slope, offset = statistics.linear_regression(*zip(*points, strict=True))
    return slope, max(abs(y - slope * x - offset) for x, y in points)


def draw(found: dict[str, Any], path: Path) -> None:
    """A panel for each question: validation losses of all seeds."""
    rows = (len(found) + 3) // 4
    figure, grid = plt.subplots(
        rows, 4, figsize=(14, 3.2 * rows), layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
    for axes, (name, question) in zip(grid.flat, found.items(), strict=False):
        top = 0.0
        for optimizer, label in NAMES.items():
            for number, each in enumerate(curves(question, optimizer)):
                steps, losses = each.steps, each.losses
                axes.plot(
                    steps,
                    losses,
                    LINES[optimizer],
                    color=COLORS[optimizer],
                    lw=1.2,
                    alpha=0.8,
                    label=label if number == 0 else None,
                )
                top = max(top, losses[len(losses) // 5])
        # the fall of the first steps would flatten all that follows
        axes.set_ylim(top=top)
        axes.set_title(f"{name}\n{PANELS.get(name, '')}".strip(), fontsize="medium")
        axes.grid(alpha=0.25)
    grid[0, 0].set_ylabel("validation loss, nats per byte")
    grid[0, 0].legend(frameon=False)
    figure.suptitle("Validation loss, a line for each seed; lower is better")
    figure.supxlabel("step")
    figure.savefig(path, dpi=72)
    plt.close(figure)
