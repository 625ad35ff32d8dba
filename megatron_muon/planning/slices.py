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
from megatron_muon.planning.layout import MatrixShape, Parameter, Span


@dataclass(frozen=True, slots=True)
class Matrix(MatrixShape):
    """A whole matrix of the stage, or a strip, and the rank that orthogonalizes it."""

    # number of equal column ranges that staging lays out one after another; each holds
    # some of every column block
    column_parts: int = 1
    home: int = 0  # rank of the stage's group
    parameter: int = 0  # index of its parameter in the plan

    @property
    def whole(self) -> tuple[int, int]:
        """``unit``, or (rows, cols) of the matrix that it is a strip of: what its scale
        depends on.
        """
        return self.unit if self.strip is None else (self.strip.rows, self.strip.cols)

    @property
    def whole_name(self) -> str:
        """``name``, or that of the matrix that it is a strip of."""
        return self.name if self.strip is None else self.name.rpartition("[strip ")[0]

    @property
    def comes_as_rows(self) -> bool:
        """It is a strip of which the home receives rows, and iterates on columns."""
        return self.strip is not None and self.strip.comes_as_rows

    @property
    def long(self) -> int:
        """Length of the long side of ``unit``; of a strip, of its range of the
        whole's.
        """
        return max(self.unit) if self.strip is None else self.strip.long.size

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def unit_names(self) -> list[str]:
        """A name for each unit, the same at every TP size and however it is shared.

        Ranges of columns are one matrix, or several where TP ranks hold some each.
        """
        name = self.whole_name
        parameter, _, columns = name.partition("[cols ")
        if columns:
            first = int(columns.partition("..")[0])
            return [f"{parameter}[cols {first + at}]" for at in range(self.units)]
        if self.units == 1:
            return [name]
        return [f"{name}[{at}]" for at in range(self.units)]


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
    for tp_rank, ranks in enumerate(grid.of_ep(parameter.ep_rank)):
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
                part = matrix.part(tp_rank) if parameter.column_parts > 1 else 0
                offset = (part * matrix.rows + block.matrix_row) * cols - begin
                elements = Span(max(shard.start, begin), min(shard.stop, end))
                at = elements.start + offset
                yield tp_rank, ranks[dp_rank], block.matrix, elements, at
