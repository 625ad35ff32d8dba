"""When the gathers of a step's parameters start."""

from __future__ import annotations

import pytest

from megatron_muon.planning.rounds.pipeline import ADAMW, starts

CASES: dict[str, tuple[list[int], list[int | None], list[int | None]]] = {
    "all after the first round": ([0, 0, 0], [0, 0, 0], [0, 1, None]),
    "one after each round": ([ADAMW, 0, 1], [ADAMW, 0, 1], [ADAMW, 0, 1]),
    "several after a round": ([0, 0, 0, 1], [0, 0, 0, 1], [0, 1, None, None]),
    "not before one that is needed first": ([1, 0, ADAMW], [1, 1, 1], [1, None, None]),
    "a round that updates none": ([ADAMW, ADAMW, 2], [ADAMW, ADAMW, None], [ADAMW, 0, None]),
    "the last round": ([2, 2], [2, None], [2, None]),
    "no bucket": ([], [], []),
}


@pytest.mark.parametrize(("updated", "at_once", "one_by_one"), CASES.values(), ids=CASES)
def test_gathers_start_in_the_order_of_the_forward_pass(
    updated: list[int], at_once: list[int | None], one_by_one: list[int | None]
) -> None:
    assert list(starts(updated, last=2)) == at_once
    assert list(starts(updated, last=2, one_by_one=True)) == one_by_one


@pytest.mark.parametrize(
    ("updated", "started"),
    [
        ([0, 2, 2], [0, 2, None]),
        ([2, 2, 2], [2, None, None]),
        ([0, 1, 1], [0, 1, 1]),
        ([2, 0], [2, None]),
    ],
)
def test_one_may_start_after_the_last_round_where_more_follows(
    updated: list[int], started: list[int | None]
) -> None:
    assert list(starts(updated, last=2, is_followed=True)) == started
