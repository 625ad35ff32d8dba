"""When the all-gather of each bucket of parameters starts, if it starts within the step."""

from __future__ import annotations

from collections.abc import Iterable

ADAMW = -1  # the number of AdamW's part among the rounds, before the first one


def starts(
    updated: Iterable[int], last: int, *, one_by_one: bool = False, is_followed: bool = False
) -> tuple[int | None, ...]:
    """After which round the gather of each bucket starts.

    It starts as soon as the bucket's parameters are updated, but not before the gathers that the
    forward pass waits for earlier, which it would delay.

    After the last round at most one starts: the one that the forward pass waits for first, or any
    if more of the step follows. Megatron-LM's reduction of the loss comes after the step and is
    by the group of dense gathers, so it waits for all of them that are under way.

    Args:
        updated: the last round that updates a parameter of a bucket, or ``ADAMW``; of each bucket
            in the order of the forward pass.
        last: the last round of the step.
        one_by_one: start at most one after each round.
        is_followed: whether another optimizer's rounds follow.

    Returns:
        For each bucket a round, or ``ADAMW``. Those that start after round ``last`` start at the
        end of the step. None: in the forward pass, as Megatron has it.
    """
    planned: list[int | None] = []
    at = ADAMW
    for round in updated:
        at = max(at, round)
        is_in_step = at < last or (at == last and (is_followed or not planned))
        planned.append(at if is_in_step else None)
        at += one_by_one or at == last
    return tuple(planned)
