"""How many steps a run needs for the losses of another: the leading ratio, with its
spread.

A loss that is not monotone reaches a level many times. Each curve is therefore replaced
by its monotone envelope: the non-increasing curve that is nearest to it in least
squares (pool adjacent violators; Barlow et al., Statistical Inference under Order
Restrictions, 1972). The smallest loss so far, which is often taken, lies below the
curve by the size of its noise.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

SHARES = tuple(tenth / 10 for tenth in range(1, 11))  # of the baseline's steps


class Curve(NamedTuple):
    """A loss over ascending steps, all finite, and how many losses were not."""

    steps: Any
    losses: Any
    dropped: int = 0


def curve(points: Iterable[tuple[float, float]]) -> Curve | None:
    """The curve of (step, loss) in the order of a file; None without a finite loss.

    A run that was resumed from a checkpoint writes steps again; the later loss counts.
    """
    pairs = [(float(step), float(loss)) for step, loss in points]
    finite = dict(point for point in pairs if math.isfinite(sum(point)))
    dropped = sum(not math.isfinite(sum(point)) for point in pairs)
    table = np.array(sorted(finite.items()))
    return Curve(table[:, 0], table[:, 1], dropped) if len(table) else None


def smooth(line: Curve, window: float) -> Curve:
    """Means of blocks of neighbours, each of a part ``window`` of all points."""
    size = max(1, round(len(line.steps) * window))
    starts = np.arange(0, len(line.steps), size)
    counts = np.diff(np.r_[starts, len(line.steps)])
    steps, losses = (np.add.reduceat(each, starts) / counts for each in line[:2])
    return Curve(steps, losses, line.dropped)


def envelope(line: Curve) -> Curve:
    """The non-increasing losses nearest to these in least squares, at the same
    steps.
    """
    pools: list[tuple[float, int]] = []  # mean, points
    for loss in line.losses.tolist():
        mean, size = loss, 1
        while pools and pools[-1][0] < mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    return line._replace(
        losses=np.repeat([mean for mean, _ in pools], [size for _, size in pools])
    )


def step_of(monotone: Curve, loss: float) -> float | None:
    """The first step at which a non-increasing curve is at a loss; None where it never
    is.

    A loss from before training, at step 0, counts as reached at the first step.
    """
    at = int(np.searchsorted(-monotone.losses, -loss, "left"))
    if at == len(monotone.steps):
        return None
    if at == 0:
        return float(monotone.steps[monotone.steps > 0][0])
    (before, after), (high, low) = (
        each[at - 1 : at + 1].tolist() for each in monotone[:2]
    )
    return float(before + (after - before) * (high - loss) / (high - low))


class Lead(NamedTuple):
    """One level of loss: when each run reaches it, over all pairs of seeds.

    A seed of the baseline is first at its own level at step S, the other run at step s.
    ``step`` and ``loss`` are the medians of S and of the levels over the baseline's
    seeds. ``reached`` has s of each pair and ``ratios`` its (S - s) / s; pairs that
    never reach the level are missing.
    """

    step: float
    loss: float
    reached: tuple[float, ...]
    ratios: tuple[float, ...]
    pairs: int

    @property
    def ratio(self) -> float | None:
        """The median over all pairs; None where the median pair never reaches the
        loss.
        """
        ordered = [None] * (self.pairs - len(self.ratios)) + sorted(self.ratios)
        low, high = ordered[(self.pairs - 1) // 2], ordered[self.pairs // 2]
        return None if low is None or high is None else (low + high) / 2


def leads(
    baseline: Sequence[Curve], other: Sequence[Curve], window: float
) -> list[Lead]:
    """The leading ratio of each pair of seeds, at the losses after ``SHARES`` of the
    baseline.

    S is the step at which the baseline is first at such a loss. A curve that ends level
    was there before that share of its steps, which as S would have a run lead itself.
    """
    of_baseline = _envelopes(baseline, window)
    of_other = _envelopes(other, window)
    length = min(float(each.steps[-1]) for each in baseline)
    found = []
    for share in SHARES:
        levels = [_level(each, share * length) for each in of_baseline]
        pairs = itertools.product(levels, of_other)
        steps = [(first, step_of(each, loss)) for (first, loss), each in pairs]
        reached = tuple(step for _, step in steps if step is not None)
        ratios = tuple(
            (first - step) / step for first, step in steps if step is not None
        )
        first, loss = (statistics.median(each) for each in zip(*levels, strict=True))
        found.append(Lead(first, loss, reached, ratios, len(steps)))
    return found


def _level(baseline: Curve, step: float) -> tuple[float, float]:
    """A baseline's loss after a step of the run, behind the step at which it is first
    there.
    """
    interpolated = float(np.interp(step, *baseline[:2]))
    # rounding may go below the last one
    loss = max(interpolated, float(baseline.losses[-1]))
    first = step_of(baseline, loss)
    assert first is not None
    return first, loss


def _envelopes(curves: Sequence[Curve], window: float) -> list[Curve]:
    return [envelope(smooth(line, window)) for line in curves]
