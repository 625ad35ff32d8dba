"""The ranks of a stage by EP, TP and DP rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_muon.planning.layout import Parameter, Span
from megatron_muon.settings.run import NODE


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The ranks of a stage by their coordinates.

    Attributes:
        ranks: ``ranks[ep_rank][tp_rank][dp_rank]``, a permutation of 0 … size - 1, as
            the stage's group numbers them. Expert parameters have a grid of their own,
            from the expert groups; the grid of all others has one EP rank.
        neighbours: n, where ranks k·n to k·n + n - 1 are of one node
            (``neighbours_of``).

    Raises:
        ValueError: EP or TP ranks differ in their number of ranks.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    neighbours: int = NODE

    def __post_init__(self) -> None:
        sizes = {(len(plane), len(row)) for plane in self.ranks for row in plane}
        if len(sizes) != 1:
            raise ValueError(
                f"EP ranks have TP x DP ranks of several sizes: {sorted(sizes)}"
            )

    @property
    def ep_size(self) -> int:
        return len(self.ranks)

    @property
    def tp_size(self) -> int:
        return len(self.ranks[0])

    @property
    def dp_size(self) -> int:
        return len(self.ranks[0][0])

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ep_size * self.tp_size * self.dp_size

    def holders(self, ep_rank: int, dp_rank: int) -> Iterator[int]:
        """The ranks that hold a DP rank's shard, one per TP rank."""
        return (row[dp_rank] for row in self.ranks[ep_rank])

    def tp_ranks(self) -> dict[int, int]:
        """The TP rank of every rank."""
        return {rank: tp_rank for _, tp_rank, _, rank in self.places()}

    def places(self) -> Iterator[tuple[int, int, int, int]]:
        """``(ep_rank, tp_rank, dp_rank, rank)`` of every rank."""
        for ep_rank, plane in enumerate(self.ranks):
            for tp_rank, row in enumerate(plane):
                for dp_rank, rank in enumerate(row):
                    yield ep_rank, tp_rank, dp_rank, rank


def neighbours_of(nodes: Sequence[int]) -> int:
    """How many ranks of a stage in a row are of one node, by the node of ranks 0, 1, …
    of it.

    It is a power of two, at most ``NODE``: homes of one matrix are no more than that.
    """
    count = NODE
    while any(
        len(set(nodes[at : at + count])) > 1 for at in range(0, len(nodes), count)
    ):
        count //= 2
    return count


def held_shards(parameter: Parameter, grid: RankGrid) -> Iterator[tuple[int, Span]]:
    """``(rank, elements of the parameter)`` for every rank of the stage that holds
    some.
    """
    for dp_rank, shard in parameter.shards(grid.dp_size):
        for rank in grid.holders(parameter.ep_rank, dp_rank):
            yield rank, shard
