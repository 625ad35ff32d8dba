"""Why a stage's matrices have the homes that they have, in numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.planning.plan import ExchangePlan


@dataclass(frozen=True, slots=True)
class Homes:
    """The homes of a stage.

    Attributes:
        kept: matrices that stay on a rank that holds most of them.
        moved: all others: the rank that holds most had too much work.
        largest: name of a matrix with most work.
        largest_share: its work over the mean rank's.
        busiest_share: work of the busiest rank over the mean rank's.
    """

    kept: int
    moved: int
    largest: str
    largest_share: float
    busiest_share: float

    @property
    def least_share(self) -> float:
        """The least ratio of the busiest rank's work to the mean that any homes can have."""
        return max(1.0, self.largest_share)


def homes_of(plans: Sequence[ExchangePlan]) -> Homes:
    """The homes of all of a stage's optimizers together."""
    kept = moved = 0
    largest, most = "", 0
    flops = [0] * (plans[0].size if plans else 1)
    for plan in plans:
        held: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for segment in plan.slices:
            held[segment.matrix][segment.rank] += segment.elements.size
        for index, matrix in enumerate(plan.matrices):
            stays = held[index].get(matrix.home, 0) == max(held[index].values())
            kept, moved = kept + stays, moved + (not stays)
            flops[matrix.home] += plan.flops[index]
            if plan.flops[index] > most:
                largest, most = matrix.name, plan.flops[index]
    mean = sum(flops) / len(flops)
    share = most / mean if mean else 0.0
    return Homes(kept, moved, largest, share, max(flops) / mean if mean else 1.0)
