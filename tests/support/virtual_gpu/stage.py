"""Ranks compared: one order of collectives, matching messages, and no deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from support.virtual_gpu.races import Clock, collectives_and_clocks
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.trace import RecordedCollective, RecordedMessage

# a rank of the world, and the number of a collective among its own
Node = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Faults:
    """Disagreements between ranks, in words; all are empty where everything fits."""

    # collectives over a group that ranks call in another order, number or form
    order: list[str] = field(default_factory=list)
    # sends that are not the receives of their peer
    messages: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)  # where a rank waits for ever


Calls = Mapping[int, Sequence[tuple[RecordedCollective, Clock]]]


@dataclass(slots=True)
class _Calls:
    """Every rank's collectives, with what must be done before each, and who takes
    part.
    """

    of_rank: Calls
    partners: dict[Node, set[Node]] = field(default_factory=lambda: defaultdict(set))
    faults: Faults = field(default_factory=Faults)


def check_stage(recordings: Mapping[int, Recording]) -> list[str]:
    """All faults between ranks, in words; none where the step can run on all of them
    together.

    Every rank of every group that communicates must be there.
    """
    calls = {rank: collectives_and_clocks(r.trace) for rank, r in recordings.items()}
    missing = unrecorded(calls)
    if missing:
        rank, others = min(missing.items())
        raise ValueError(
            f"rank {rank} communicates with {sorted(others)}: not recorded"
        )
    faults = check_calls(calls)
    return faults.order + faults.messages or faults.stuck


def unrecorded(calls: Calls) -> dict[int, set[int]]:
    """For each rank, the members of its groups that are not given."""
    groups = {rank: {call.group for call, _ in own} for rank, own in calls.items()}
    missing = {
        rank: {other for group in own for other in group.ranks if other not in calls}
        for rank, own in groups.items()
    }
    return {rank: others for rank, others in missing.items() if others}


def check_calls(calls: Calls) -> Faults:
    """Compare ranks with each other; ranks that are not given are taken to do what they
    must.

    1. Over a group every rank calls the same collectives in one order, with the same
       dtype, size, reduction and root.
    2. The sends from i to j are the receives of j from i in number, order, dtype and
    bytes.
    3. All of them end, where each waits for what its stream has before it and for its
       partners; looked at where the first two hold.
    """
    compared = _Calls(calls)
    _match_collectives(compared)
    _match_messages(compared)
    faults = compared.faults
    if not faults.order and not faults.messages:
        faults.stuck.extend(_stuck(compared))
    return faults


def _match_collectives(calls: _Calls) -> None:
    over: dict[str, dict[int, list[Node]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in calls.of_rank.items():
        for number, (call, _) in enumerate(own):
            if not call.point_to_point:
                over[call.group.name][rank].append((rank, number))
    for name, by_rank in over.items():
        first = next(iter(by_rank.values()))
        ranks = [r for r in _call(calls, first[0]).group.ranks if r in calls.of_rank]
        counts = {rank: len(by_rank.get(rank, [])) for rank in ranks}
        if len(set(counts.values())) > 1:
            calls.faults.order.append(f"group {name}: collectives by rank {counts}")
        for position, nodes in enumerate(
            zip(*(by_rank.get(r, []) for r in ranks), strict=False)
        ):
            _compare(calls, f"group {name}, collective {position}", nodes)


def _compare(calls: _Calls, where: str, nodes: Sequence[Node]) -> None:
    every = [_call(calls, node) for node in nodes]
    for node, call in zip(nodes, every, strict=True):
        calls.partners[node] |= set(nodes)
        if call.agreed != every[0].agreed:
            calls.faults.order.append(
                f"{where}: rank {node[0]} calls {_said(call)}, rank {nodes[0][0]} "
                f"{_said(every[0])}"
            )
            return


def _match_messages(calls: _Calls) -> None:
    """Sends and receives, on each ordered pair of ranks and stream in order."""
    sends: dict[tuple[str, int, int], list[tuple[Node, RecordedMessage]]] = defaultdict(
        list
    )
    receives: dict[tuple[str, int, int], list[tuple[Node, RecordedMessage]]] = (
        defaultdict(list)
    )
    for rank, own in calls.of_rank.items():
        for number, (call, _) in enumerate(own):
            if call.point_to_point:
                calls.partners[rank, number].add((rank, number))
                for m in call.sends:
                    sends[call.own_stream, call.rank, m.peer].append(
                        ((rank, number), m)
                    )
                for m in call.receives:
                    receives[call.own_stream, m.peer, call.rank].append(
                        ((rank, number), m)
                    )
    for channel in sorted(set(sends) | set(receives)):
        sent, taken = sends[channel], receives[channel]
        stream, i, j = channel
        ranks = _call(calls, (sent or taken)[0][0]).group.ranks
        if ranks[i] not in calls.of_rank or ranks[j] not in calls.of_rank:
            continue
        if [_what(m) for _, m in sent] != [_what(m) for _, m in taken]:
            calls.faults.messages.append(
                f"{stream}: {i} sends {j} {_sizes([m for _, m in sent])}, {j} takes "
                f"{_sizes([m for _, m in taken])}"
            )
        for (sender, _), (receiver, _) in zip(sent, taken, strict=False):
            calls.partners[sender].add(receiver)
            calls.partners[receiver].add(sender)


def _stuck(calls: _Calls) -> list[str]:
    """Run all collectives; if no rank can go on, return what each of them waits in."""
    done: dict[int, dict[str, int]] = {rank: defaultdict(int) for rank in calls.of_rank}
    waiting = {rank: list(range(len(own))) for rank, own in calls.of_rank.items()}
    nccl = {call.own_stream for own in calls.of_rank.values() for call, _ in own}

    def ready(node: Node) -> bool:
        rank, number = node
        _, clock = calls.of_rank[rank][number]
        return all(done[rank][s] >= time for s, time in clock.items() if s in nccl)

    ended: set[Node] = set()
    moved = True
    while moved:
        moved = False
        started: set[Node] = set()
        for rank, numbers in waiting.items():
            heads: set[str] = set()
            for number in numbers:
                stream = _call(calls, (rank, number)).own_stream
                if stream not in heads and ready((rank, number)):
                    started.add((rank, number))
                heads.add(stream)
        together = started | ended
        for node in started:
            if calls.partners[node] <= together:
                ended.add(node)
                waiting[node[0]].remove(node[1])
                done[node[0]][_call(calls, node).own_stream] += 1
                moved = True
    return [
        f"deadlock: rank {rank} waits in {_said(_call(calls, (rank, numbers[0])))}"
        for rank, numbers in waiting.items()
        if numbers
    ]


def _call(calls: _Calls, node: Node) -> RecordedCollective:
    return calls.of_rank[node[0]][node[1]][0]


def _what(message: RecordedMessage) -> tuple[object, int]:
    return message.dtype, message.nbytes


def _sizes(messages: Sequence[RecordedMessage]) -> str:
    said = map(_what, messages)
    return ", ".join(f"{nbytes} B of {dtype}" for dtype, nbytes in said) or "nothing"


def _said(call: RecordedCollective) -> str:
    return (
        f"{call.name} {call.agreed} over {call.group.name} in {call.phase} "
        f"({call.place})"
    )
