"""The clocks of all ranks: host, compute stream and communication stream of each.

A host launches operations in the order of the step. The compute stream runs them one
after another, each after its launch. The communication stream runs grouped sends and
receives, each after all operations that the compute stream was given before it. A group
ends once its peers have begun theirs and the bytes have arrived. Only peers that share
bytes wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron_muon.lab.pricing.hardware import GIGA, MICRO, Hardware
from megatron_muon.lab.pricing.kernels import Cost
from megatron_muon.lab.pricing.work import Pairs

WAITING = "waiting"  # for messages, on the compute stream


def nodes_of(world_ranks: Sequence[int], hardware: Hardware) -> list[int]:
    """The node of each rank: world ranks k·n to k·n + n - 1 share one, n being a node's
    GPUs.
    """
    return [rank // hardware.gpus_per_node for rank in world_ranks]


class Streams:
    """Seconds since the start of the step, by rank, and by phase.

    Args:
        hardware: the hardware of every rank.
        size: number of ranks.
        nodes: the node of each rank; None: as ``nodes_of`` numbers a stage that is all
            of a run.
        host_works: the host makes every operation itself, as on a CPU, in place of
            launching it.

    Attributes:
        host, compute, communication: time at which each ends the work that it has been
            given.
        spent: seconds of the compute stream by phase and rank; ``WAITING`` is a phase,
            too.
        travelling: seconds that the communication stream sends and receives, by rank.
        launches: number of launches by rank.
    """

    def __init__(
        self,
        hardware: Hardware,
        size: int,
        nodes: Sequence[int] | None = None,
        *,
        host_works: bool = False,
    ) -> None:
        self.hardware = hardware
        self.nodes = nodes_of(range(size), hardware) if nodes is None else nodes
        self._host_works = host_works
        self.travelling = [0.0] * size
        self.host = [0.0] * size
        self.compute = [0.0] * size
        self.communication = [0.0] * size
        self.spent: dict[str, list[float]] = defaultdict(lambda: [0.0] * size)
        self.launches = [0] * size

    @property
    def ends(self) -> list[float]:
        """The time at which each rank has ended its step."""
        return [max(clocks) for clocks in zip(self.host, self.compute, strict=True)]

    def run(
        self,
        phase: str,
        cost_of: Callable[[int], Cost],
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Run a phase on all ranks, or some, that have work in it."""
        for rank in range(len(self.host)) if ranks is None else ranks:
            cost = cost_of(rank)
            if cost.launches:
                self._run(phase, rank, cost)

    def exchange(self, pairs: Pairs) -> dict[int, float]:
        """Start a grouped send and receive on every rank that sends or receives bytes.

        Returns:
            The time at which each of these ranks has all of its messages.
        """
        peers: dict[int, set[int]] = defaultdict(set)
        for sender, receiver in pairs:
            peers[sender].add(receiver)
            peers[receiver].add(sender)
        begins = {rank: self._enqueued(rank, len(peers[rank])) for rank in peers}
        links = _Links(self.hardware, self.nodes, pairs)
        hardware = self.hardware
        for rank, others in peers.items():
            met = max(begins[rank], *(begins[peer] for peer in others))
            latency = (hardware.message_us + hardware.peer_us * len(others)) * MICRO
            travels = latency + links.seconds(rank)
            self.travelling[rank] += travels
            self.communication[rank] = met + travels
        return {rank: self.communication[rank] for rank in peers}

    def wait(self, ends: Mapping[int, float]) -> None:
        """Let the compute streams wait for messages."""
        waiting = self.spent[WAITING]
        for rank, end in ends.items():
            now = max(self.compute[rank], self.host[rank])
            waiting[rank] += max(0.0, end - now)
            self.compute[rank] = max(self.compute[rank], end)
            if self._host_works:
                self.host[rank] = max(now, end)

    def _run(self, phase: str, rank: int, cost: Cost) -> None:
        hardware, launch = self.hardware, self.hardware.launch_us * MICRO
        begin = self.host[rank] + hardware.phase_us * MICRO
        self.launches[rank] += cost.launches
        self.host[rank] = begin + cost.launches * launch + cost.host
        if self._host_works:
            end = max(self.compute[rank], self.host[rank]) + cost.seconds
            self.host[rank] = end
        else:  # the last operation ends after its launch and its own time
            end = max(
                max(self.compute[rank], begin + launch) + cost.seconds,
                self.host[rank] + cost.seconds / cost.launches,
            )
        self.spent[phase][rank] += cost.seconds
        self.compute[rank] = end

    def _enqueued(self, rank: int, peers: int) -> float:
        """The time at which the rank's communication stream can start a group launched
        now.
        """
        hardware = self.hardware
        each = hardware.launch_us + hardware.phase_us + hardware.peer_host_us * peers
        self.host[rank] += each * MICRO
        self.launches[rank] += 1
        return max(self.communication[rank], self.compute[rank], self.host[rank])


class _Links:
    """The time of one exchange's bytes on each rank's links."""

    def __init__(self, hardware: Hardware, nodes: Sequence[int], pairs: Pairs) -> None:
        self._hardware = hardware
        # by rank: bytes out and in, inside the node and to other nodes
        self._bytes: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self._peers: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self._pairs_of: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for (sender, receiver), count in pairs.items():
            kind = 0 if nodes[sender] == nodes[receiver] else 2
            for rank, way in ((sender, kind), (receiver, kind + 1)):
                self._bytes[rank][way] += count
                self._peers[rank][way] += 1
            self._pairs_of[sender].append((receiver, kind + 1, count))
            self._pairs_of[receiver].append((sender, kind, count))

    def seconds(self, rank: int) -> float:
        """The time of a rank's messages, by its own links and its share of each peer's
        link.
        """
        node, network = self._hardware.node_link, self._hardware.network_link
        out, into, out_far, into_far = self._bytes[rank]
        most = max(max(out, into) / node, max(out_far, into_far) / network)
        for peer, way, count in self._pairs_of[rank]:
            rate = node if way < 2 else network
            at_peer = min(count * self._peers[peer][way], self._bytes[peer][way]) / rate
            most = max(most, at_peer)
            if way < 2:
                most = max(most, count / (self._hardware.pair_gbytes * GIGA))
        return most
