"""Each rank's work in each round of a plan: elements, matrices, and bytes by pair."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rounds.table import stays_in_place
from megatron_muon.planning.slices import Matrix

Shape = tuple[int, int]
Pairs = dict[tuple[int, int], int]  # bytes by (sender, receiver)


class Shared(NamedTuple):
    """A strip of a matrix: the whole's rows and columns, its number of strips, the strip's length.

    ``is_turned`` says that its rows come, and its columns are iterated on.
    """

    whole: tuple[int, int]
    strips: int
    long: int
    is_turned: bool


class Layout(NamedTuple):
    """Matrices that Newton-Schulz can take together: of one shape, staged in one way."""

    rows: int
    cols: int
    column_parts: int
    column_blocks: int
    shared: Shared | None = None

    @staticmethod
    def of(matrix: Matrix) -> Layout:
        shared = None
        if matrix.strip is not None:
            shared = Shared(matrix.whole, matrix.strip.count, matrix.long, matrix.is_turned)
        return Layout(*matrix.unit, matrix.column_parts, matrix.column_blocks, shared)


@dataclass(frozen=True, slots=True)
class RoundWork:
    """One round; lists are by rank.

    Attributes:
        held: elements of the rank's pieces.
        pieces: number of these pieces.
        arriving: elements that the rank receives as a home.
        arrivals: number of segments of these elements.
        kept: elements of its matrices that it holds itself.
        keeps: number of segments of these elements.
        leaving: elements of directions that it sends as a home.
        departures: number of segments of these elements.
        layouts: number of matrices of each layout that it orthogonalizes.
        gather, scatter: bytes by pair of ranks.
    """

    held: list[int]
    pieces: list[int]
    arriving: list[int]
    arrivals: list[int]
    kept: list[int]
    keeps: list[int]
    leaving: list[int]
    departures: list[int]
    layouts: list[Counter[Layout]]
    gather: Pairs = field(default_factory=lambda: defaultdict(int))
    scatter: Pairs = field(default_factory=lambda: defaultdict(int))

    def staged(self, rank: int) -> int:
        """Elements of the matrices whose home the rank is."""
        return self.kept[rank] + self.arriving[rank]

    def in_place(self, rank: int) -> bool:
        """Whether what the rank holds of its matrices stays where it is written."""
        return stays_in_place(self.kept[rank], self.arriving[rank], self.leaving[rank])


def rounds_of(plan: ExchangePlan) -> list[RoundWork]:
    """Every round of a plan, for all ranks in one pass over its segments."""
    rounds = [_idle(plan.size) for _ in plan.rounds]
    round_of = {
        index: work for work, members in zip(rounds, plan.rounds, strict=True) for index in members
    }
    pieces_seen: set[tuple[int, int]] = set()
    for segment in plan.slices:
        work, elements = round_of[segment.parameter], segment.elements.size
        rank, home = segment.rank, plan.matrices[segment.matrix].home
        work.held[rank] += elements
        if (segment.parameter, rank) not in pieces_seen:
            pieces_seen.add((segment.parameter, rank))
            work.pieces[rank] += 1
        if home == rank:
            work.kept[home] += elements
            work.keeps[home] += 1
            continue
        work.leaving[home] += elements
        work.departures[home] += 1
        work.scatter[home, rank] += elements * plan.itemsize
        if not segment.replica:
            work.arriving[home] += elements
            work.arrivals[home] += 1
    for (number, rank, home), elements in plan.gathered_elements().items():
        rounds[number].gather[rank, home] = elements * plan.itemsize
    matrices = iter(plan.matrices)
    for index, parameter in enumerate(plan.parameters):
        for _ in parameter.matrices:
            matrix = next(matrices)
            round_of[index].layouts[matrix.home][Layout.of(matrix)] += matrix.units
    return rounds


def held_elements(plan: ExchangePlan) -> list[int]:
    """Elements of Muon's parameters on each rank."""
    held = [0] * plan.size
    for segment in plan.slices:
        held[segment.rank] += segment.elements.size
    return held


def total(counts: Sequence[Sequence[int]]) -> list[int]:
    """The sum of several lists, by rank."""
    return [sum(of_rank) for of_rank in zip(*counts, strict=True)]


def _idle(size: int) -> RoundWork:
    def zeros() -> list[int]:
        return [0] * size

    layouts: list[Counter[Layout]] = [Counter() for _ in range(size)]
    own = zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros()
    return RoundWork(*own, layouts)
