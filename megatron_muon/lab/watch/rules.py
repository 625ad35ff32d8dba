"""Warnings about a run, each with its place on the troubleshooting page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from megatron_muon.lab.watch.history import History

LOW, HIGH = 0.5, 1.25  # of a promised update; five Newton-Schulz steps give 0.75 to 0.95 of it
GROWTH = 2.0  # of a layer's output, from the second quarter of the records to the last
SETTLED = 1000  # steps; before, outputs grow from their start in every run
FEWEST = 8  # records in which growth and lateness can be seen
LOGIT = 100.0  # Kimi K2's threshold; a run's own clip has its own
LATE = 1.5  # times the planned ratio between the slowest rank and the mean


@dataclass(frozen=True, slots=True)
class Warning:
    """One warning.

    Attributes:
        text: what is seen.
        see: the heading on the troubleshooting page.
    """

    text: str
    see: str


def warnings(history: History, logit_threshold: float | None) -> list[Warning]:
    """The warnings that the records so far give.

    Args:
        history: the records.
        logit_threshold: largest attention logit without a warning; None for that of the run's clip,
            or ``LOGIT`` where it has none.
    """
    if not history.steps:
        return []
    if logit_threshold is None:
        logit_threshold = history.start.logit_threshold or LOGIT
    return [
        *_share(history),
        *_not_finite(history),
        *_update_sizes(history),
        *_without_gradient(history),
        *_growing_outputs(history),
        *_logits(history, logit_threshold),
        *_late_rank(history),
    ]


def _share(history: History) -> Iterator[Warning]:
    share = history.start.muon_share
    if share is not None and share < 0.5:
        text = f"Muon has {share:.1%} of the parameters, less than half"
        yield Warning(text, "The advantage is small")


def _not_finite(history: History) -> Iterator[Warning]:
    columns = [
        f"{name} of {row}"
        for (_, row, name), place in history.columns.items()
        if place < len(history.steps[-1].numbers) and math.isinf(history.steps[-1].numbers[place])
    ]
    if columns:
        yield Warning(f"not finite in the last step: {_some(columns)}", "Loss spikes")


def _update_sizes(history: History) -> Iterator[Warning]:
    off = []
    for row, promised in history.start.promised.items():
        last = [v for v in history.values(("muon", row, "update_rms"))[-2:] if math.isfinite(v)]
        ratios = [value / promised for value in last] if promised else []
        if len(ratios) == 2 and (max(ratios) < LOW or min(ratios) > HIGH):
            off.append(f"{row} {ratios[-1]:.2f}")
    if off:
        text = f"updates are off their promised size, as a share of it: {_some(off)}"
        yield Warning(text, "Updates are off their promised size")


def _without_gradient(history: History) -> Iterator[Warning]:
    idle = []
    for row in history.rows("muon"):
        moved = history.values(("muon", row, "moved"))[-1]
        if moved < 1.0:
            idle.append(f"{row} {1 - moved:.0%}")
    if idle:
        text = f"matrices without a gradient in the last step: {_some(idle)}"
        yield Warning(text, "Gains are smaller in a mixture of experts")


def _growing_outputs(history: History) -> Iterator[Warning]:
    growing = []
    for row in history.rows("layers") if history.steps[-1].step >= SETTLED else []:
        values = [v for v in history.values(("layers", row, "output_rms")) if math.isfinite(v)]
        quarter = len(values) // 4
        if len(values) < FEWEST:
            continue
        before, now = median(values[quarter : 2 * quarter]), median(values[-quarter:])
        if before > 0 and now > GROWTH * before:
            growing.append(f"{row} {now / before:.1f} times")
    if growing:
        yield Warning(f"outputs of layers grow: {_some(growing)}", "Outputs grow")


def _logits(history: History, threshold: float) -> Iterator[Warning]:
    above = [
        f"{row} {value:.4g}"
        for row in history.rows("logits")
        for value in history.values(("logits", row, "max_logit"))[-1:]
        if math.isfinite(value) and value > threshold
    ]
    if above:
        yield Warning(f"attention logits above {threshold:g}: {_some(above)}", "Loss spikes")


def _late_rank(history: History) -> Iterator[Warning]:
    last = [step.times for step in history.steps[-FEWEST:] if step.times is not None]
    planned = history.start.planned
    if len(last) < FEWEST or not planned:
        return
    late = [times.rank for times in last if times.max > LATE * planned * times.mean]
    rank = max(late, key=late.count, default=None)
    if rank is not None and late.count(rank) > FEWEST * 3 // 4:
        times = last[-1]
        text = (
            f"rank {rank} is late: its Newton-Schulz takes {times.max:.3g} ms, the mean rank's "
            f"{times.mean:.3g} ms; planned was {planned:.2f} times the mean"
        )
        yield Warning(text, "Throughput falls")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
