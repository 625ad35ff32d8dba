"""One rank's part of the plan that all ranks of a stage share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_muon.planning.grid import RankGrid, held_shards
from megatron_muon.planning.layout import Parameter, Span
from megatron_muon.planning.schedule import round_numbers
from megatron_muon.planning.slices import Matrix, Slice

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


def rank_plan(
    rank: int,
    grid: RankGrid,
    parameters: Sequence[Parameter],
    matrices: Sequence[Matrix],
    slices: Sequence[Slice],
    rounds: Sequence[Sequence[int]],
) -> RankPlan:
    """One rank's part of the plan that has these fields; see ``plan.ExchangePlan``."""
    made = tuple(RankRound() for _ in rounds)
    round_of = {index: made[at] for index, at in round_numbers(rounds).items()}
    for index, matrix in enumerate(matrices):
        if matrix.home == rank:
            round_of[matrix.parameter].homes.append(index)
    for one in slices:
        round, home = round_of[one.parameter], matrices[one.matrix].home
        if rank == home == one.rank:
            # no replica: replicas are on other TP ranks than the home
            round.kept.append(one)
        elif rank == home:
            round.guests[one.rank].append(one)
        elif rank == one.rank:
            round.away[home].append(one)
    shards: dict[int, Span] = {}
    for index, parameter in enumerate(parameters):
        for holder, shard in held_shards(parameter, grid):
            if holder == rank:
                shards[index] = shard
    return RankPlan(rank, shards, made)
