"""When the all-gather of each bucket of parameters starts, if it starts within the step."""

from __future__ import annotations

from collections.abc import Iterable

ADAMW = -1  # the number of AdamW's part among the rounds, before the first one


def starts(
    updated: Iterable[int], last: int, *, one_by_one: bool = False
) -> tuple[int | None, ...]:
    """After which round the gather of each bucket starts.

    It starts as soon as the bucket's parameters are updated, but not before the gathers that the
    forward pass waits for earlier, which it would delay.

    Args:
        updated: the last round that updates a parameter of a bucket, or ``ADAMW``; of each bucket
            in the order of the forward pass.
        last: the last round of the step.
        one_by_one: start at most one after each round.

    Returns:
        For each bucket a round, or ``ADAMW``. Those that start after round ``last`` start at the
        end of the step. None: in the forward pass, as Megatron has it.
    """
    planned: list[int | None] = []
    at = ADAMW
    for round in updated:
        at = max(at, round)
        planned.append(at if at <= last else None)
        at += one_by_one
    return tuple(planned)
