"""The paper's algorithm (arXiv 2502.16982, Algorithm 1) over the run's shards, priced.

- A rank with a slice of a matrix gathers all others' slices in 16 bits, over DP and
  over TP, orthogonalizes the whole matrix, one after another, and keeps the direction
  of its slice.
- It sends its slice to each of them, on the same link at the same time: the busier way
counts.
- All gathers are two messages a step, and nothing hides them: one matrix's cost little.
- Momentum and update are the plugin's fused kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_muon.lab.pricing.hardware import MICRO, Hardware
from megatron_muon.lab.pricing.kernels import Cost, newton_schulz, stream
from megatron_muon.lab.pricing.step import adamw
from megatron_muon.lab.pricing.work import Optimizer
from megatron_muon.orthogonalize.iteration import ns_flops
from megatron_muon.orthogonalize.numerics import Numerics

_MESSAGES = 2
# bytes an element, and launches, of the fused kernels (``pricing.step``)
_ELEMENTWISE = (24, 5)


@dataclass(slots=True)
class Gathering:
    """A rank's step: its work, and bytes (sent, received) in its node and with
    others.
    """

    cost: Cost = field(default_factory=Cost)
    inside: list[int] = field(default_factory=lambda: [0, 0])
    between: list[int] = field(default_factory=lambda: [0, 0])
    flops: int = 0

    def exposed(self, hardware: Hardware) -> float:
        """Seconds of its messages."""
        links = (
            max(self.inside) / hardware.node_link
            + max(self.between) / hardware.network_link
        )
        return links + _MESSAGES * hardware.message_us * MICRO if links else 0.0


def price_paper(
    optimizers: Sequence[Optimizer],
    numerics: Numerics,
    hardware: Hardware,
    nodes: Sequence[int],
) -> list[Gathering]:
    """Each rank's step; the plans' matrices are whole, and their homes are not read."""
    ranks = [Gathering() for _ in nodes]
    for optimizer in optimizers:
        plan = optimizer.plan
        tp_rank_of = plan.grid.tp_ranks()
        held: dict[tuple[int, int], dict[int, int]] = defaultdict(
            lambda: defaultdict(int)
        )
        for (
            part
        ) in plan.slices:  # each TP rank gathers its own copy of a replicated weight
            is_copy = plan.parameters[part.parameter].replicated
            copy = tp_rank_of[part.rank] if is_copy else 0
            held[part.matrix, copy][part.rank] += part.elements.size
        for (index, _), holders in held.items():
            matrix = plan.matrices[index]
            own = numerics.where(matrix.own)
            cost = newton_schulz(hardware, *matrix.unit, 1, own).times(matrix.units)
            flops = matrix.units * ns_flops(*matrix.unit, own)
            by_node: dict[int, list[int]] = defaultdict(list)
            for rank, elements in holders.items():
                by_node[nodes[rank]].append(elements)
            for rank, elements in holders.items():
                one, near = ranks[rank], by_node[nodes[rank]]
                one.cost += cost
                one.flops += flops
                one.inside[0] += (len(near) - 1) * elements * plan.itemsize
                one.inside[1] += (sum(near) - elements) * plan.itemsize
                one.between[0] += (len(holders) - len(near)) * elements * plan.itemsize
                one.between[1] += (matrix.numel - sum(near)) * plan.itemsize
        for rank, (muon, rest) in enumerate(
            zip(optimizer.muon, optimizer.rest, strict=True)
        ):
            nbytes, launches = _ELEMENTWISE
            ranks[rank].cost += stream(hardware, nbytes * muon, launches) + adamw(
                hardware, rest
            )
    return ranks
