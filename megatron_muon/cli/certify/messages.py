"""The messages of the exchange: what a rank sends and takes beside what the plan says of its peers.

The plan's side is counted from its segments, without the code that makes a rank's part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.virtual_gpu.trace import Collective, Message

Sizes = dict[tuple[int, int], list[int]]  # bytes from one rank of the stage to another, in order


def planned_messages(plans: Sequence[ExchangePlan]) -> Sizes:
    """The bytes of every message of a step, by sender and receiver.

    Args:
        plans: of the stage's optimizers, in the order in which they step.
    """
    sizes: Sizes = defaultdict(list)
    for plan in plans:
        gathers, scatters = _by_round(plan)
        for messages in _in_turn(gathers, scatters):
            for pair, nbytes in messages.items():
                sizes[pair].append(nbytes)
    return dict(sizes)


def _by_round(plan: ExchangePlan) -> tuple[list[_Round], list[_Round]]:
    """Pieces to homes, each with an element for whether it moves; and directions back."""
    gathers: list[_Round] = [defaultdict(int) for _ in plan.rounds]
    scatters: list[_Round] = [defaultdict(int) for _ in plan.rounds]
    round_of = plan.round_of()
    for segment in plan.segments:
        home, number = plan.matrices[segment.matrix].home, round_of[segment.parameter]
        if home == segment.rank:
            continue
        if not segment.replica:
            gathers[number][segment.rank, home] += (segment.elements.size + 1) * plan.itemsize
        scatters[number][home, segment.rank] += segment.elements.size * plan.itemsize
    return gathers, scatters


_Round = defaultdict[tuple[int, int], int]


def _in_turn(gathers: Sequence[_Round], scatters: Sequence[_Round]) -> Iterator[_Round]:
    """A round is gathered before the directions of the one before it go back."""
    yield from gathers[:1]
    for at, scatter in enumerate(scatters):
        yield from gathers[at + 1 : at + 2]
        yield scatter


def compare_with_plan(
    rank: int, calls: Iterable[Collective], planned: Sizes, dtype: torch.dtype
) -> list[str]:
    """Faults of one rank's messages in a step, in words.

    Args:
        rank: of the stage.
        calls: its launches of the exchange in that step, in order.
        planned: by ``planned_messages``.
        dtype: the one in which elements travel.
    """
    sent: dict[int, list[Message]] = defaultdict(list)
    taken: dict[int, list[Message]] = defaultdict(list)
    for call in calls:
        for message in call.sends:
            sent[message.peer].append(message)
        for message in call.receives:
            taken[message.peer].append(message)
    faults = []
    pairs = [pair for pair in planned if rank in pair]
    wanted_of = [b if a == rank else a for a, b in pairs]
    for peer in sorted({*sent, *taken, *wanted_of}):
        for messages, pair in ((sent[peer], (rank, peer)), (taken[peer], (peer, rank))):
            wanted = [(dtype, nbytes) for nbytes in planned.get(pair, [])]
            seen = [(message.dtype, message.nbytes) for message in messages]
            if seen != wanted:
                faults.append(_said(rank, pair, seen, wanted))
    return faults


def _said(
    rank: int,
    pair: tuple[int, int],
    seen: Sequence[tuple[torch.dtype, int]],
    wanted: Sequence[tuple[torch.dtype, int]],
) -> str:
    sender, receiver = pair
    does, other, others = (
        ("sends", receiver, "takes") if sender == rank else ("takes", sender, "sends")
    )
    at = next(
        (i for i, (one, two) in enumerate(zip(seen, wanted, strict=False)) if one != two),
        min(len(seen), len(wanted)),
    )
    towards = "to" if sender == rank else "from"
    return (
        f"rank {rank} of the stage {does} {_size(seen, at)} {towards} rank {other} as message "
        f"{at}, where by the plan rank {other} {others} {_size(wanted, at)} "
        f"({len(seen)} messages, {len(wanted)} planned)"
    )


def _size(messages: Sequence[tuple[torch.dtype, int]], at: int) -> str:
    if at >= len(messages):
        return "nothing"
    dtype, nbytes = messages[at]
    return f"{nbytes:,} B of {str(dtype).removeprefix('torch.')}"
