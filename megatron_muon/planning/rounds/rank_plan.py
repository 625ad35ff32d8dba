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
    """The matrices that a rank orthogonalizes in a round, and what it sends, receives
    and keeps.

    Lists are in the order of the plan's slices.
    """

    # indices of the matrices that it orthogonalizes
    homes: list[int] = field(default_factory=list)
    # by home, the slices that it sends there
    gather_to: _ByRank = field(default_factory=_by_rank)
    # by rank, the slices that it receives as their home
    gather_from: _ByRank = field(default_factory=_by_rank)
    # by rank, the slices whose results it sends there as their home: those of
    # gather_from, and replicas, which only receive
    scatter_to: _ByRank = field(default_factory=_by_rank)
    # by home, the slices whose results it receives: those of gather_to, and replicas
    scatter_from: _ByRank = field(default_factory=_by_rank)
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
        home = matrices[one.matrix].home
        if rank in (home, one.rank):
            _route(round_of[one.parameter], one, rank, home)
    shards: dict[int, Span] = {}
    for index, parameter in enumerate(parameters):
        for holder, shard in held_shards(parameter, grid):
            if holder == rank:
                shards[index] = shard
    return RankPlan(rank, shards, made)


def _route(round: RankRound, one: Slice, rank: int, home: int) -> None:
    if home == one.rank:
        # no replica: replicas are on other TP ranks than the home
        round.kept.append(one)
        return
    mine = one.rank == rank
    other = home if mine else one.rank
    (round.scatter_from if mine else round.scatter_to)[other].append(one)
    if not one.replica:
        (round.gather_to if mine else round.gather_from)[other].append(one)
