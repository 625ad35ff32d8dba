"""What ranks send in a step: bytes inside a node and between nodes, peers, messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_muon.lab.pricing.work import Pairs, rounds_of
from megatron_muon.planning.plan import ExchangePlan


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one step; every list is by rank of the stage.

    Attributes:
        inside: bytes that the rank sends to others of its node.
        between: bytes that it sends to other nodes.
        messages: number of messages that it sends.
        peers: number of ranks that it sends to or receives from.
    """

    inside: tuple[int, ...]
    between: tuple[int, ...]
    messages: tuple[int, ...]
    peers: tuple[int, ...]

    @property
    def sent(self) -> list[int]:
        """All bytes that each rank sends."""
        return [sum(both) for both in zip(self.inside, self.between, strict=True)]


def traffic_of(exchanges: Iterable[Pairs], nodes: Sequence[int]) -> Traffic:
    """The traffic of some exchanges.

    Args:
        exchanges: bytes by (sender, receiver), one message each.
        nodes: the node of each rank.
    """
    size = len(nodes)
    inside, between, messages = [0] * size, [0] * size, [0] * size
    peers: list[set[int]] = [set() for _ in nodes]
    for pairs in exchanges:
        for (sender, receiver), nbytes in pairs.items():
            way = inside if nodes[sender] == nodes[receiver] else between
            way[sender] += nbytes
            messages[sender] += 1
            peers[sender].add(receiver)
            peers[receiver].add(sender)
    return Traffic(tuple(inside), tuple(between), tuple(messages), tuple(map(len, peers)))


def exchanges_of(plans: Iterable[ExchangePlan]) -> Iterator[Pairs]:
    """The exchanges of a step in the order of rounds: pieces there, directions back."""
    for plan in plans:
        for work in rounds_of(plan):
            yield work.gather
            yield work.scatter
        for shared in plan.shared:
            yield from (dict(message.sizes) for message in shared.messages())
