"""Runs: elements that lie together in a parameter on one rank and in the staging of one matrix.

Plain integers, known before a home is chosen; with it a run is a segment of the plan.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import Parameter, Span
from megatron_muon.planning.segments import Matrix, Segment


class Run(NamedTuple):
    """Elements contiguous in a parameter on one rank and in the staging of one matrix."""

    parameter: int
    matrix: int
    tp_rank: int
    rank: int
    elements: Span
    start: int


def all_runs(parameters: Sequence[Parameter], grid: RankGrid) -> Iterator[Run]:
    """Every run of a stage, by parameter, TP rank and DP rank; matrices count over parameters."""
    first_matrix = 0
    for index, parameter in enumerate(parameters):
        pieces = list(parameter.pieces(grid.dp_size))
        for tp_rank, row in enumerate(grid.of_ep(parameter.ep_rank)):
            for dp_rank, matrix, elements, start in _runs(parameter, tp_rank, pieces):
                yield Run(index, first_matrix + matrix, tp_rank, row[dp_rank], elements, start)
        first_matrix += len(parameter.matrices)


def _runs(
    parameter: Parameter, tp_rank: int, pieces: Sequence[tuple[int, Span]]
) -> Iterator[tuple[int, int, Span, int]]:
    """``(dp_rank, matrix of the parameter, its elements, start in the matrix's staging)``.

    Pieces come in the order of elements: one walk over both.
    """
    cols, first = parameter.shape[1], 0
    blocks = sorted(parameter.blocks[tp_rank], key=lambda block: block.rows)
    for dp_rank, piece in pieces:
        while first < len(blocks) and blocks[first].rows.stop * cols <= piece.start:
            first += 1
        for block in itertools.islice(blocks, first, None):
            block_start = block.rows.start * cols
            if block_start >= piece.stop:
                break
            start, stop = max(piece.start, block_start), min(piece.stop, block.rows.stop * cols)
            matrix = parameter.matrices[block.matrix]
            part = matrix.part(tp_rank) if parameter.column_parts > 1 else 0
            offset = (part * matrix.rows + block.matrix_row) * cols - block_start
            yield dp_rank, block.matrix, Span(start, stop), start + offset


def segments_of(
    parameters: Sequence[Parameter],
    matrices: Sequence[Matrix],
    runs: Iterable[Run],
    grid: RankGrid,
) -> Iterator[Segment]:
    """The runs with their matrices' homes known: which of them are replicas."""
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


def held_elements(parameter: Parameter, grid: RankGrid) -> list[dict[int, int]]:
    """For each matrix of a parameter, the elements of it that each rank holds."""
    held: list[dict[int, int]] = [defaultdict(int) for _ in parameter.matrices]
    pieces = list(parameter.pieces(grid.dp_size))
    for tp_rank, row in enumerate(grid.of_ep(parameter.ep_rank)):
        for dp_rank, matrix, elements, _ in _runs(parameter, tp_rank, pieces):
            held[matrix][row[dp_rank]] += elements.size
    return held
