"""The order of a step: every event of a stage's optimizers on one rank.

While a round is orthogonalized, the slices of the next one travel to their homes, and
the results of the one before travel back. The next optimizer's first round is
orthogonalized while the last results of the one before it travel. A round that has
no message on a rank starts and ends there between its neighbours, so that it takes no
memory earlier.

``runtime.engine`` steps in this order. ``planning.clock`` times it in integers,
``pricing.step`` in seconds, and ``pricing.memory`` follows its buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

ADAMW = -1  # the number of AdamW's part among the rounds, before the first one

# start: advance the state of a round's shards, and send their slices to the homes.
# assemble: wait for the matrices. scatter: send the results back. update: wait for
# the results of a round's shards, and update these. adamw: update all other shards.
Action = Literal["start", "assemble", "orthogonalize", "scatter", "update", "adamw"]


class Event(NamedTuple):
    """What ranks do at a time.

    Attributes:
        action: see ``Action``.
        optimizer: number of the optimizer among those of the stage.
        round: number of its round; ``ADAMW`` for AdamW's part.
        travels: True where only ranks do it that send or receive something in this
            round, False where only the others do, None where all do.
    """

    action: Action
    optimizer: int
    round: int
    travels: bool | None = None

    def is_for(self, travels: bool) -> bool:
        """Whether a rank does it that has (or has not) a message in its round."""
        return self.travels in (None, travels)


def step_events(rounds: Sequence[int]) -> Iterator[Event]:
    """All events of a step, in order.

    AdamW's part of the first optimizer runs while its first round travels. That of
    another one waits until the optimizer before it has ended. (If it runs on the host,
    the engine takes it last.)

    Args:
        rounds: number of rounds of each optimizer, in the order of their steps.
    """
    under_way: list[Event] = []  # the update of the round whose results travel
    for optimizer, count in enumerate(rounds):
        adamw = Event("adamw", optimizer, ADAMW)
        if count:
            yield Event("start", optimizer, 0, travels=True)
        if optimizer == 0:
            yield adamw
        for number in range(count):
            yield Event("start", optimizer, number, travels=False)
            yield Event("assemble", optimizer, number)
            if number + 1 < count:
                yield Event("start", optimizer, number + 1, travels=True)
            yield Event("orthogonalize", optimizer, number)
            yield from under_way
            if optimizer and number == 0:
                yield adamw
            yield Event("scatter", optimizer, number)
            yield Event("update", optimizer, number, travels=False)
            under_way = [Event("update", optimizer, number, travels=True)]
        if optimizer and not count:
            yield from under_way
            yield adamw
            under_way = []
    yield from under_way


def round_numbers(rounds: Sequence[Sequence[int]]) -> dict[int, int]:
    """The number of each parameter's round, from the parameters of each round."""
    numbers: dict[int, int] = {}
    for number, round in enumerate(rounds):
        numbers |= dict.fromkeys(round, number)
    return numbers
