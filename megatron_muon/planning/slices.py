"""Matrices of a stage, and the slices that they are assembled from.

A matrix is assembled at its home in *staging order*: its column parts (one unless TP
cuts the columns) one after another, each row-major. In that order every range of
elements that is contiguous in a parameter is contiguous in the matrix, wherever a shard
was cut.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import Matrix, Parameter, Span


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements contiguous in a parameter on one rank and in the staging of one
    matrix.
    """

    parameter: int  # parameter, matrix: indices in the plan
    matrix: int
    rank: int  # the rank of the stage that holds the elements
    elements: Span  # their range in the flat local parameter
    start: int  # place of elements.start in the matrix's staging order
    # a TP replica of elements that another rank sends; it only receives results
    replica: bool

    @property
    def staged(self) -> Span:
        return Span(self.start, self.start + self.elements.size)


# NCCL copies a buffer that starts at no multiple of 16 bytes one byte a load
# (``reduceCopy`` in src/device/common_kernel.h, v2.20 to v2.30). So messages of slices
# and of results start at multiples of 8 elements, though Megatron's own buckets cut
# shards anywhere.
ALIGNED = 8


def gather_message(elements: int, slices: int) -> int:
    """Elements of a message of slices to their home, with a flag for each, up to where
    the next one starts.
    """
    return -(-(elements + slices) // ALIGNED) * ALIGNED


def all_slices(
    parameters: Sequence[Parameter], matrices: Sequence[Matrix], grid: RankGrid
) -> Iterator[Slice]:
    """Every slice of a stage, by parameter, TP rank and DP rank."""
    tp_rank_of = grid.tp_ranks()
    first_matrix = 0
    for index, parameter in enumerate(parameters):
        for tp_rank, rank, matrix, elements, start in _of_parameter(parameter, grid):
            other = tp_rank != tp_rank_of[matrices[first_matrix + matrix].home]
            replica = parameter.replicated and other
            yield Slice(index, first_matrix + matrix, rank, elements, start, replica)
        first_matrix += len(parameter.matrices)


def held_elements(parameter: Parameter, grid: RankGrid) -> list[dict[int, int]]:
    """For each matrix of a parameter, the elements of it that each rank holds."""
    held: list[dict[int, int]] = [defaultdict(int) for _ in parameter.matrices]
    for _, rank, matrix, elements, _ in _of_parameter(parameter, grid):
        held[matrix][rank] += elements.size
    return held


def _of_parameter(
    parameter: Parameter, grid: RankGrid
) -> Iterator[tuple[int, int, int, Span, int]]:
    """``(TP rank, rank, matrix of the parameter, its elements, start in the matrix's
    staging)``.

    Shards come in the order of elements: one walk over them and the blocks of rows.
    """
    shards, cols = list(parameter.shards(grid.dp_size)), parameter.shape[1]
    for tp_rank, ranks in enumerate(grid.ranks[parameter.ep_rank]):
        blocks, first = (
            sorted(parameter.blocks[tp_rank], key=lambda block: block.rows),
            0,
        )
        for dp_rank, shard in shards:
            while first < len(blocks) and blocks[first].rows.stop * cols <= shard.start:
                first += 1
            for block in itertools.islice(blocks, first, None):
                begin, end = block.rows.start * cols, block.rows.stop * cols
                if begin >= shard.stop:
                    break
                matrix = parameter.matrices[block.matrix]
                parts = parameter.column_parts
                part = tp_rank - matrix.held_by(parts).start if parts > 1 else 0
                offset = (part * matrix.rows + block.matrix_row) * cols - begin
                elements = Span(max(shard.start, begin), min(shard.stop, end))
                at = elements.start + offset
                yield tp_rank, ranks[dp_rank], block.matrix, elements, at
