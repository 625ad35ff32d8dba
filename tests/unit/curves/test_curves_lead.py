"""The leading ratio: curves whose answers are known, and what must hold for any curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.lab.curves.lead import Curve, Lead, curve, envelope, leads


def along(losses: Sequence[float]) -> Curve:
    """A curve of these losses at steps 1, 2, ..."""
    made = curve(enumerate(losses, 1))
    assert made is not None
    return made


LOSSES = st.lists(st.floats(-10, 10, allow_nan=False), min_size=1, max_size=30)


def power_law(scale: float, steps: int = 1000) -> Curve:
    """1 + (t / scale)^-0.5: with half the scale every loss is reached in half the steps."""
    return along([1 + (step / scale) ** -0.5 for step in range(1, steps + 1)])


def test_the_band_is_that_of_all_pairs_of_seeds() -> None:
    baseline = [power_law(2.0), power_law(4.0)]
    other = [power_law(1.0), power_law(0.5)]
    last = leads(baseline, other, 0.0)[-1]
    assert sorted(last.ratios) == pytest.approx([1.0, 3.0, 3.0, 7.0], rel=1e-9)
    assert last.ratio == pytest.approx(3.0, rel=1e-9) and last.pairs == 4


def test_pairs_that_never_reach_a_loss_count_as_the_lowest() -> None:
    baseline = [power_law(2.0)]
    never = [power_law(1.0), power_law(8.0), power_law(8.0)]
    last = leads(baseline, never, 0.0)[-1]
    assert len(last.reached) == 1 and last.pairs == 3 and last.ratio is None
    last = leads(baseline, [*never[:2], power_law(1.0)], 0.0)[-1]
    assert last.ratio == pytest.approx(1.0, rel=1e-9)
    assert Lead(4.0, 1.0, (1.0, 2.0), (3.0, 1.0), pairs=3).ratio == 1.0


@given(LOSSES)
def test_an_envelope_is_the_nearest_curve_that_never_rises(losses: list[float]) -> None:
    """By the max-min formula of isotonic regression, which no pool enters."""
    fitted = envelope(along(losses)).losses.tolist()
    assert all(later <= earlier for earlier, later in pairwise(fitted))
    assert math.fsum(fitted) == pytest.approx(math.fsum(losses), abs=1e-9)

    def mean(first: int, last: int) -> float:
        return math.fsum(losses[first : last + 1]) / (last + 1 - first)

    count = len(losses)
    for at, loss in enumerate(fitted):
        nearest = min(
            max(mean(first, last) for last in range(at, count)) for first in range(at + 1)
        )
        assert loss == pytest.approx(nearest, abs=1e-9)


def test_a_resumed_runs_later_losses_win_and_what_is_not_finite_is_counted() -> None:
    joined = curve([(1, 3.0), (2, 2.0), (3, float("nan")), (2, 2.5), (3, 1.0)])
    assert joined is not None and joined.dropped == 1
    assert (joined.steps.tolist(), joined.losses.tolist()) == ([1, 2, 3], [3.0, 2.5, 1.0])
    assert curve([(1, float("inf"))]) is None
