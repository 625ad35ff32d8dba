"""When messages travel moves no bit: late ones, early ones, and ranks that are
delayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from support.models.gpt import Case, Topology, trained, truth
from support.runs.messages import early, late, read_before_the_wait, sent_is_used_again
from support.runs.whole import differences

CASE = Case(layers=2, steps=2).with_muon(round_bytes=20_000)  # several rounds
TP_DP = Topology(tp=2, dp=2)


@pytest.mark.parametrize(
    "schedule", [late, early], ids=lambda schedule: schedule.__name__
)
@pytest.mark.parametrize(
    ("case", "topology"),
    [
        (CASE, Topology(dp=3)),
        (CASE, replace(TP_DP, overlap=True)),
        (replace(CASE, moe=True), replace(TP_DP, ep=2, etp=1, sequence_parallel=True)),
    ],
    ids=["dp3", "overlap", "experts"],
)
def test_when_messages_travel_moves_no_bit(
    case: Case, topology: Topology, schedule: Callable[[], Any]
) -> None:
    assert differences(truth(case), trained(case, topology, schedule)) == []


@pytest.mark.parametrize(
    "mutant",
    [read_before_the_wait, sent_is_used_again],
    ids=lambda mutant: mutant.__name__,
)
def test_a_step_that_does_not_wait_is_noticed(mutant: Callable[[], Any]) -> None:
    try:
        assert differences(truth(CASE), trained(CASE, TP_DP, mutant))
    except AssertionError as error:  # NaN is unlike NaN, so replicas differ first
        assert "replicas differ" in str(error)
