"""The time model predicts how long real processes wait for each other."""

from __future__ import annotations

import pytest

from figures.sleeping_ranks import Case, compared, said

LARGE = [Case(tp, 64 // tp, round_kib=512, layers=32, seconds=2.0) for tp in (8, 2)]


@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, dp=4),
        Case(tp=4, dp=2, round_kib=512),
        Case(tp=4, dp=2, round_kib=128),
        *(pytest.param(case, marks=pytest.mark.slow) for case in LARGE),
    ],
)
def test_a_step_of_sleeping_ranks_takes_what_the_model_says(case: Case) -> None:
    """Never less, but for the clock; and not much more, on a machine that does other
    things, too: what the model leaves out here is Python and gloo on two cores. With
    smaller rounds ranks take turns, and the step takes 1, 1.6 and 2 times as long as
    its busiest rank works.
    """
    for _ in range(5):  # other work on the machine only adds time
        result = compared(case)
        assert result.error <= 0.02, said(case, result)
        if result.error >= -0.35:
            return
    pytest.fail(said(case, result))
