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
from support.runs.topologies import DP3, TP2_DP2
from support.runs.whole import differences

CASE = Case(steps=2).with_muon(round_bytes=20_000)  # several rounds


@pytest.mark.parametrize("schedule", [late, early])
@pytest.mark.parametrize(
    "case, topology",
    [
        (CASE, DP3),
        (CASE, replace(TP2_DP2, overlap=True)),
        (
            replace(CASE, moe=True),
            replace(TP2_DP2, ep=2, etp=1, sequence_parallel=True),
        ),
    ],
)
def test_when_messages_travel_moves_no_bit(
    case: Case, topology: Topology, schedule: Callable[[], Any]
) -> None:
    assert differences(truth(case), trained(case, topology, schedule)) == []


@pytest.mark.parametrize("mutant", [read_before_the_wait, sent_is_used_again])
def test_a_step_that_does_not_wait_is_noticed(mutant: Callable[[], Any]) -> None:
    try:
        assert differences(truth(CASE), trained(CASE, TP2_DP2, mutant))
    except AssertionError as error:  # NaN is unlike NaN, so replicas differ first
        assert "replicas differ" in str(error)
