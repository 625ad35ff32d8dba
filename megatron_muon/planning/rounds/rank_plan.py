"""One rank's part of the plan that all ranks of a stage share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_muon.planning.layout import Span
from megatron_muon.planning.slices import Slice

_ByRank = dict[int, list[Slice]]


def _by_rank() -> _ByRank:
    return defaultdict(list)


@dataclass(frozen=True, slots=True)
class RankRound:
    """The matrices that a rank orthogonalizes in a round, and the slices that it sends,
    receives and keeps.

    Slices go to their homes, and their results come back; replicas only get results.
    Lists are in the order of the plan's slices.
    """

    # indices of the matrices that it orthogonalizes
    homes: list[int] = field(default_factory=list)
    # by home, the slices that it holds of matrices there
    away: _ByRank = field(default_factory=_by_rank)
    # by rank, the slices that are held there of matrices whose home it is
    guests: _ByRank = field(default_factory=_by_rank)
    kept: list[Slice] = field(default_factory=list)  # the slices that are home already


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part of an ``ExchangePlan``."""

    rank: int  # its number in the stage
    # by parameter index, the elements that it holds; only of parameters that it holds
    shards: Mapping[int, Span]
    rounds: tuple[RankRound, ...]  # its part of each round

    @property
    def homes(self) -> list[int]:
        """Indices of the matrices that it orthogonalizes, in the order of the plan."""
        return sorted(index for round in self.rounds for index in round.homes)
