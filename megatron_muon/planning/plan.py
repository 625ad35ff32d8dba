"""The exchange plan: which rank orthogonalizes which matrix, and every run of elements that moves.

Plain integers, a pure function of the stage's parameters, its grid of ranks and the settings. So
every rank makes the same plan without communication, and tests can count its messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.config import MuonConfig
from megatron_muon.orthogonalize.iteration import Device, ns_flops
from megatron_muon.planning.grid import RankGrid, held_pieces
from megatron_muon.planning.homes import Work, choose_homes, prices
from megatron_muon.planning.layout import Parameter, Span
from megatron_muon.planning.rank_plan import RankPlan, rank_plan
from megatron_muon.planning.rounds import make_rounds
from megatron_muon.planning.segments import Matrix, Segment


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All of a stage's Muon work in one step; see the module's docstring.

    Attributes:
        flops: Newton-Schulz flops of each matrix.
        itemsize: bytes of an element that travels.
        rounds: indices of the parameters that go through the exchange together, in order.
    """

    parameters: tuple[Parameter, ...]
    matrices: tuple[Matrix, ...]
    segments: tuple[Segment, ...]
    grid: RankGrid
    itemsize: int
    flops: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of ranks in the stage."""
        return self.grid.size

    def for_rank(self, rank: int) -> RankPlan:
        """The part of one rank of the stage."""
        return rank_plan(
            rank, self.grid, self.parameters, self.matrices, self.segments, self.rounds
        )

    def silent_rounds(self) -> list[bool]:
        """For each round, whether nothing moves between ranks in it."""
        silent = [True] * len(self.rounds)
        round_of = self.round_of()
        for segment in self.segments:
            if self.matrices[segment.matrix].home != segment.rank:
                silent[round_of[segment.parameter]] = False
        return silent

    def round_of(self) -> dict[int, int]:
        """The round of each parameter."""
        return {index: number for number, round in enumerate(self.rounds) for index in round}

    def ns_flops(self) -> list[int]:
        """Newton-Schulz floating-point operations of each rank in a step."""
        flops = [0] * self.size
        for matrix, work in zip(self.matrices, self.flops, strict=True):
            flops[matrix.home] += work
        return flops

    def sent_bytes(self) -> list[int]:
        """Bytes that each rank sends to others in a step: pieces there, directions back.

        A segment takes one element more to its home, which says whether it has a gradient.
        """
        sent = [0] * self.size
        for segment in self.segments:
            home = self.matrices[segment.matrix].home
            if home == segment.rank:
                continue
            sent[home] += segment.elements.size * self.itemsize
            if not segment.replica:
                sent[segment.rank] += (segment.elements.size + 1) * self.itemsize
        return sent

    def boundary_parameters(self) -> list[Parameter]:
        dp_size = self.grid.dp_size
        return [p for p in self.parameters if p.is_boundary(dp_size)]

    def validate(self) -> None:
        """Check that each matrix's elements are gathered once, and each piece gets directions once.

        Raises:
            ValueError: names the first matrix or parameter with a hole or an overlap.
        """
        gathered: dict[int, list[Span]] = defaultdict(list)
        returned: dict[tuple[int, int], list[Span]] = defaultdict(list)
        for segment in self.segments:
            if not segment.replica:
                gathered[segment.matrix].append(segment.staged)
            returned[segment.parameter, segment.rank].append(segment.elements)
        for index, matrix in enumerate(self.matrices):
            _require_cover(matrix.name, gathered[index], Span(0, matrix.numel))
        for index, parameter in enumerate(self.parameters):
            for rank, piece in held_pieces(parameter, self.grid):
                _require_cover(parameter.name, returned.pop((index, rank), []), piece)
        if returned:
            index, rank = min(returned)
            raise ValueError(f"{self.parameters[index].name}: rank {rank} holds no piece of it")


def make_plan(
    parameters: Sequence[Parameter], grid: RankGrid, config: MuonConfig, device: Device = "cuda"
) -> ExchangePlan:
    """Choose the homes and lay out every segment.

    Args:
        parameters: the stage's Muon parameters, in an order that is the same on all ranks.
        grid: the stage's ranks.
        config: ``homes``, the two speeds, ``round_bytes`` and the Newton-Schulz settings are read.
        device: the kind of device of all ranks, on which an iteration's cost depends.

    Raises:
        ValueError: the pieces do not cover a parameter exactly once.
    """
    shapes = [(parameter, shape) for parameter in parameters for shape in parameter.matrices]
    runs = list(_all_runs(parameters, grid))
    held = _held_elements(runs, len(shapes))
    flops = tuple(shape.units * ns_flops(*shape.unit, config, device) for _, shape in shapes)
    itemsize = 4 if config.ns_dtype == "fp32" else 2
    work = [
        Work(one, shape.rows * shape.cols, by_rank)
        for one, (_, shape), by_rank in zip(flops, shapes, held, strict=True)
    ]
    homes = choose_homes(work, grid.size, config.homes, prices(config, itemsize))
    matrices = tuple(
        Matrix(s.name, s.rows, s.cols, parameter.column_parts, s.column_blocks, home, s.units)
        for (parameter, s), home in zip(shapes, homes, strict=True)
    )
    plan = ExchangePlan(
        parameters=tuple(parameters),
        matrices=matrices,
        segments=tuple(_segments(parameters, matrices, runs, grid)),
        grid=grid,
        itemsize=itemsize,
        flops=flops,
        rounds=_rounds(parameters, matrices, held, itemsize, config),
    )
    plan.validate()
    return plan


def _rounds(
    parameters: Sequence[Parameter],
    matrices: Sequence[Matrix],
    held: Sequence[Mapping[int, int]],
    itemsize: int,
    config: MuonConfig,
) -> tuple[tuple[int, ...], ...]:
    """Rounds that keep to ``round_bytes``, where two rounds use memory at a time.

    If all rounds are alike, a home has at most three copies of a matrix: the one that is
    orthogonalized, the message that it comes in and the one that it goes in. Another rank has two
    copies of a piece. So in each of two rounds a matrix counts 3/2 at its home, a piece 1. Where
    nothing travels, as with an expert DP of 1, one round uses memory: a matrix counts 1/2.
    """
    homed: list[dict[int, int]] = [defaultdict(int) for _ in parameters]
    taken: list[dict[int, int]] = [defaultdict(int) for _ in parameters]
    owner = [index for index, parameter in enumerate(parameters) for _ in parameter.matrices]
    moved = list(zip(owner, matrices, held, strict=True))
    halves = 3 if any(set(by_rank) != {matrix.home} for _, matrix, by_rank in moved) else 1
    for index, matrix, by_rank in moved:
        homed[index][matrix.home] += matrix.numel * itemsize
        for rank, elements in by_rank.items():
            if rank != matrix.home:
                taken[index][rank] += elements * itemsize
        taken[index][matrix.home] += -(-halves * matrix.numel * itemsize // 2)
    return make_rounds(homed, taken, config.round_bytes)


class _Run(NamedTuple):
    """Elements contiguous in a parameter on one rank and in the staging of one matrix."""

    parameter: int
    matrix: int
    tp_rank: int
    rank: int
    elements: Span
    start: int


def _all_runs(parameters: Sequence[Parameter], grid: RankGrid) -> Iterator[_Run]:
    first_matrix = 0
    for index, parameter in enumerate(parameters):
        pieces = list(parameter.pieces(grid.dp_size))
        for tp_rank, row in enumerate(grid.of_ep(parameter.ep_rank)):
            for dp_rank, piece in pieces:
                for matrix, elements, start in _runs(parameter, tp_rank, piece):
                    rank, matrix_index = row[dp_rank], first_matrix + matrix
                    yield _Run(index, matrix_index, tp_rank, rank, elements, start)
        first_matrix += len(parameter.matrices)


def _runs(parameter: Parameter, tp_rank: int, piece: Span) -> Iterator[tuple[int, Span, int]]:
    """``(matrix of the parameter, elements of the parameter, start in the matrix's staging)``."""
    cols = parameter.shape[1]
    part = tp_rank if parameter.column_parts > 1 else 0
    for block in parameter.blocks[tp_rank]:
        block_start = block.rows.start * cols
        start, stop = max(piece.start, block_start), min(piece.stop, block.rows.stop * cols)
        if start < stop:
            part_start = part * parameter.matrices[block.matrix].rows * cols
            offset = part_start + block.matrix_row * cols - block_start
            yield block.matrix, Span(start, stop), start + offset


def _segments(
    parameters: Sequence[Parameter],
    matrices: Sequence[Matrix],
    runs: Sequence[_Run],
    grid: RankGrid,
) -> Iterator[Segment]:
    tp_rank_of = grid.tp_ranks()
    for run in runs:
        home = matrices[run.matrix].home
        yield Segment(
            parameter=run.parameter,
            matrix=run.matrix,
            rank=run.rank,
            elements=run.elements,
            start=run.start,
            replica=parameters[run.parameter].replicated and run.tp_rank != tp_rank_of[home],
        )


def _held_elements(runs: Sequence[_Run], matrices: int) -> list[dict[int, int]]:
    """For each matrix, the elements of it that each rank holds."""
    held: list[dict[int, int]] = [defaultdict(int) for _ in range(matrices)]
    for run in runs:
        held[run.matrix][run.rank] += run.elements.size
    return held


def _require_cover(name: str, spans: list[Span], whole: Span) -> None:
    position = whole.start
    for span in sorted(spans):
        if span.start != position:
            kind = "is not covered" if span.start > position else "is covered twice"
            raise ValueError(f"{name}: element {min(span.start, position)} {kind}")
        position = span.stop
    if position != whole.stop:
        raise ValueError(f"{name}: elements {position} to {whole.stop} are not covered exactly")
