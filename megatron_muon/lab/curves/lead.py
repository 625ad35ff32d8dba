"""How many steps a run needs for the losses of another: the leading ratio, with its spread.

A loss that is not monotone reaches a level many times. Each curve is therefore replaced by its
monotone envelope: the non-increasing curve that is nearest to it in least squares (pool adjacent
violators; Barlow et al., Statistical Inference under Order Restrictions, 1972). The smallest loss
so far, which is often taken, lies below the curve by the size of its noise.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.lab.curves.curve import Curve, Points

SHARES = tuple(tenth / 10 for tenth in range(1, 11))  # of the baseline's steps
WINDOWS = (0.0, 0.01, 0.02, 0.05)  # parts of a curve's points that are averaged; 0 is none
USUAL_WINDOW = 0.02
DECIDES = 0.1  # a leading ratio that moves by more than this under other windows hangs on them


@dataclass(frozen=True, slots=True)
class Lead:
    """One level of loss: when each run reaches it, over all pairs of seeds.

    Attributes:
        step: S, the baseline's step.
        loss: the baseline's loss there, the median of its seeds.
        reached: s, the other run's steps at its pair's loss; a pair that never reaches it is
            missing.
        ratios: (S - s) / s of the same pairs.
        pairs: pairs of seeds.
    """

    step: float
    loss: float
    reached: tuple[float, ...]
    ratios: tuple[float, ...]
    pairs: int

    @property
    def ratio(self) -> float | None:
        """The median over all pairs; None where the median pair never reaches the loss."""
        return _median_of(self.ratios, self.pairs)


def _median_of(values: Sequence[float], pairs: int) -> float | None:
    """The median of ``pairs`` values; missing ones count as below all others."""
    ordered = [None] * (pairs - len(values)) + sorted(values)
    low, high = ordered[(pairs - 1) // 2], ordered[pairs // 2]
    return None if low is None or high is None else (low + high) / 2


def smooth(points: Points, window: float) -> Points:
    """Means of blocks of neighbouring points, each at the mean of its steps.

    Args:
        points: (step, loss), ascending.
        window: a block's part of all points; a block of one point is that point.
    """
    size = max(1, round(len(points) * window))
    blocks = [points[start : start + size] for start in range(0, len(points), size)]
    return tuple(
        (statistics.fmean(step for step, _ in block), statistics.fmean(loss for _, loss in block))
        for block in blocks
    )


def envelope(points: Points) -> Points:
    """The non-increasing losses nearest to these in least squares, at the same steps."""
    pools: list[tuple[float, int]] = []  # mean, points
    for _, loss in points:
        pool = (loss, 1)
        while pools and pools[-1][0] < pool[0]:
            mean, size = pools.pop()
            total = size + pool[1]
            pool = ((mean * size + pool[0] * pool[1]) / total, total)
        pools.append(pool)
    losses = itertools.chain.from_iterable([mean] * size for mean, size in pools)
    return tuple((step, loss) for (step, _), loss in zip(points, losses, strict=True))


def loss_at(monotone: Points, step: float) -> float:
    """The loss at a step, linear between points, and the nearest point's outside of them."""
    at = bisect.bisect_left(monotone, step, key=lambda point: point[0])
    if at == 0 or at == len(monotone):
        return monotone[min(at, len(monotone) - 1)][1]
    (before, high), (after, low) = monotone[at - 1], monotone[at]
    return high + (low - high) * (step - before) / (after - before)


def step_of(monotone: Points, loss: float) -> float | None:
    """The first step at which a non-increasing curve is at a loss; None where it never is."""
    at = bisect.bisect_left(monotone, -loss, key=lambda point: -point[1])
    if at == len(monotone):
        return None
    if at == 0:
        return monotone[0][0]
    (before, high), (after, low) = monotone[at - 1], monotone[at]
    return before + (after - before) * (high - loss) / (high - low)


def leads(baseline: Sequence[Curve], other: Sequence[Curve], window: float) -> list[Lead]:
    """The leading ratio over training, of each pair of seeds.

    Args:
        baseline: a curve for each of its seeds.
        other: likewise of the run that may need fewer steps.
        window: see ``smooth``.

    Returns:
        A ``Lead`` for each of ``SHARES`` of the steps that all seeds of the baseline have.
    """
    of_baseline = [envelope(smooth(each.points, window)) for each in baseline]
    of_other = [envelope(smooth(each.points, window)) for each in other]
    last = min(each.last_step for each in baseline)
    return [_lead(of_baseline, of_other, share * last) for share in SHARES]


def _lead(baseline: Sequence[Points], other: Sequence[Points], step: float) -> Lead:
    levels = [loss_at(each, step) for each in baseline]
    pairs = list(itertools.product(levels, other))
    crossings = [(step_of(curve, level), _first_step(curve)) for level, curve in pairs]
    reached = tuple(each or first for each, first in crossings if each is not None)
    ratios = tuple((step - each) / each for each in reached)
    return Lead(step, statistics.median(levels), reached, ratios, len(pairs))


def _first_step(points: Points) -> float:
    """The first step after 0. A loss that a run reaches earlier counts as reached there."""
    return next(step for step, _ in points if step > 0)


@dataclass(frozen=True, slots=True)
class Need:
    """The steps that the baseline needs for a loss of the other run's; medians over the seeds.

    Attributes:
        step: the other run's step.
        loss: its loss there.
        baseline_step: the baseline's step at that loss; None where it never reaches it.
    """

    step: float
    loss: float
    baseline_step: float | None


def needs(baseline: Sequence[Curve], other: Sequence[Curve], window: float) -> list[Need]:
    """The baseline's steps for each loss of the other run's, at ``SHARES`` of its steps."""
    of_baseline = [envelope(smooth(each.points, window)) for each in baseline]
    of_other = [envelope(smooth(each.points, window)) for each in other]
    last = min(each.last_step for each in other)
    needed = []
    for step in (share * last for share in SHARES):
        loss = statistics.median(loss_at(each, step) for each in of_other)
        steps = [step_of(each, loss) for each in of_baseline]
        later = [-each for each in steps if each is not None]
        median = _median_of(later, len(steps))
        needed.append(Need(step, loss, None if median is None else -median))
    return needed


def smoothing_decides(baseline: Sequence[Curve], other: Sequence[Curve]) -> list[float | None]:
    """The last leading ratio under each of ``WINDOWS``."""
    return [leads(baseline, other, window)[-1].ratio for window in WINDOWS]


def hangs_on_window(ratios: Sequence[float | None]) -> bool:
    """Whether ratios under several windows differ so much that the window is the answer."""
    numbers = [ratio for ratio in ratios if ratio is not None]
    if not numbers or len(numbers) < len(ratios):
        return bool(numbers)
    return max(numbers) - min(numbers) > DECIDES or min(numbers) < 0 < max(numbers)
