"""The messages of the exchange: what a rank sends and takes beside what the plan says
of its peers.

The plan's side is counted from its segments, without the code that makes a rank's part
of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron_muon.orthogonalize.matmul import TORCH_DTYPE
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.sharing.strips import SharedMessages
from megatron_muon.settings.config import MuonConfig
from support.virtual_gpu.trace import RecordedCollective, RecordedMessage

# (dtype, bytes) of the messages from one rank of the stage to another, in order
Sizes = dict[tuple[int, int], list[tuple[torch.dtype, int]]]


def planned_messages(plans: Sequence[ExchangePlan], config: MuonConfig) -> Sizes:
    """Every message of a step, by sender and receiver."""
    sizes: Sizes = defaultdict(list)
    numerics = Numerics(config, "cuda")
    travels, directions = TORCH_DTYPE[numerics.travels], TORCH_DTYPE[numerics.dtype]
    squares = TORCH_DTYPE[numerics.held]
    dtypes = {"numbers": torch.float32, "squares": squares, "elements": travels}
    for plan in plans:
        gathers, scatters = _by_round(plan)
        for number, gather, scatter in _in_turn(gathers, scatters):
            for pair, nbytes in gather.items():
                sizes[pair].append((travels, nbytes))
            for message in _between_homes(plan, number):
                dtype = dtypes[message.kind]
                for pair, nbytes in message.sizes.items():
                    sizes[pair].append((dtype, nbytes))
            for pair, nbytes in scatter.items():
                sizes[pair].append((directions, nbytes))
    return dict(sizes)


def _between_homes(plan: ExchangePlan, number: int | None) -> Iterator[SharedMessages]:
    """The messages between the homes of each matrix of a round that several share."""
    for one in plan.shared:
        if number is not None and one.parameter in plan.rounds[number]:
            yield from one.messages()


def _by_round(plan: ExchangePlan) -> tuple[list[_Round], list[_Round]]:
    """Pieces to homes, each with an element for whether it moves, up to a multiple of
    8; and directions back.
    """
    gathers: list[_Round] = [defaultdict(int) for _ in plan.rounds]
    scatters: list[_Round] = [defaultdict(int) for _ in plan.rounds]
    round_of = plan.round_of()
    for segment in plan.slices:
        home, number = plan.matrices[segment.matrix].home, round_of[segment.parameter]
        if home == segment.rank:
            continue
        if not segment.replica:
            gathers[number][segment.rank, home] += segment.elements.size + 1
        scatters[number][home, segment.rank] += segment.elements.size * plan.itemsize
    for gather in gathers:
        for pair, elements in gather.items():
            gather[pair] = math.ceil(elements / 8) * 8 * plan.itemsize
    return gathers, scatters


_Round = defaultdict[tuple[int, int], int]


def _in_turn(
    gathers: Sequence[_Round], scatters: Sequence[_Round]
) -> Iterator[tuple[int | None, _Round, _Round]]:
    """``(round that is orthogonalized or None, messages before it, after it)``, in
    turn.

    A round is gathered before the one before it is orthogonalized and its directions go
    back.
    """
    nothing: _Round = defaultdict(int)
    yield from ((None, gather, nothing) for gather in gathers[:1])
    for at, scatter in enumerate(scatters):
        yield at, (gathers[at + 1] if at + 1 < len(gathers) else nothing), scatter


def compare_with_plan(
    rank: int, calls: Iterable[RecordedCollective], planned: Sizes
) -> list[str]:
    """Faults of one rank's messages in a step, in words."""
    sent: dict[int, list[RecordedMessage]] = defaultdict(list)
    taken: dict[int, list[RecordedMessage]] = defaultdict(list)
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
            wanted = planned.get(pair, [])
            seen = [(message.dtype, message.nbytes) for message in messages]
            if seen != wanted:
                faults.append(_said(rank, pair, seen, wanted))
    return faults


def unaligned(calls: Iterable[RecordedCollective]) -> list[str]:
    """Messages of a rank that NCCL copies one byte a load, in words.

    It copies 16 bytes a load where both ends start at 16 bytes (``planning.slices``).
    """
    return [
        f"{call.phase}: {message.nbytes:,} B {towards} rank {message.peer} start "
        f"{message.start:,} B into their buffer, which is no multiple of 16"
        for call in calls
        for towards, messages in (("to", call.sends), ("from", call.receives))
        for message in messages
        if message.nbytes >= 16 and message.start % 16
    ]


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
        (
            i
            for i, (one, two) in enumerate(zip(seen, wanted, strict=False))
            if one != two
        ),
        min(len(seen), len(wanted)),
    )
    towards = "to" if sender == rank else "from"
    return (
        f"rank {rank} of the stage {does} {_size(seen, at)} {towards} rank {other} as "
        f"message {at}, where by the plan rank {other} {others} {_size(wanted, at)} "
        f"({len(seen)} messages, {len(wanted)} planned)"
    )


def _size(messages: Sequence[tuple[torch.dtype, int]], at: int) -> str:
    if at >= len(messages):
        return "nothing"
    dtype, nbytes = messages[at]
    return f"{nbytes:,} B of {str(dtype).removeprefix('torch.')}"
