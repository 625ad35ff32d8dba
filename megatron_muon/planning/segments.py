"""Matrices of a stage, and the runs of elements that they are assembled from.

A matrix is assembled at its home in *staging order*: its column parts (one unless TP cuts the
columns) one after another, each row-major. In that order every run of elements that is contiguous
in a parameter is contiguous in the matrix, wherever a shard was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_muon.planning.layout import Span, Strip


@dataclass(frozen=True, slots=True)
class Matrix:
    """A whole matrix of the stage and the rank that orthogonalizes it.

    Attributes:
        name: parameter name, with the part in brackets where a parameter holds several.
        rows, cols: size over all TP ranks.
        column_parts: number of equal column ranges that staging lays out one after another.
        column_blocks: number of equal column ranges of which each part holds a piece, in order.
        units, unit: number of matrices that Newton-Schulz takes it as, and (rows, cols) of each:
            its column blocks one by one, or all of it.
        home: rank of the stage's group.
        strip: which range it is of a matrix that several homes share; then ``rows`` and ``cols``
            are those of the elements that come to its home.
    """

    name: str
    rows: int
    cols: int
    column_parts: int
    column_blocks: int
    home: int
    units: int = 1
    strip: Strip | None = None

    @property
    def unit(self) -> tuple[int, int]:
        return self.rows, self.cols // self.units

    @property
    def whole(self) -> tuple[int, int]:
        """``unit``, or (rows, cols) of the matrix that it is a strip of: what its scale goes by."""
        return self.unit if self.strip is None else (self.strip.rows, self.strip.cols)

    @property
    def whole_name(self) -> str:
        """``name``, or that of the matrix that it is a strip of."""
        return self.name if self.strip is None else self.name.rpartition("[strip ")[0]

    @property
    def is_turned(self) -> bool:
        """It is a strip whose homes turn its matrix (``layout.Strip``)."""
        return self.strip is not None and self.strip.is_turned

    @property
    def long(self) -> int:
        """Length of the long side of ``unit``; of a strip, of its range of the whole's."""
        return max(self.unit) if self.strip is None else self.strip.long.size

    @property
    def numel(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements contiguous in a parameter on one rank and in the staging of one matrix.

    Attributes:
        parameter, matrix: indices in the plan.
        rank: the rank of the stage that holds the elements.
        elements: their range in the flat local parameter.
        start: place of ``elements.start`` in the matrix's staging order.
        replica: a TP replica of elements that another rank sends; it only receives directions.
    """

    parameter: int
    matrix: int
    rank: int
    elements: Span
    start: int
    replica: bool

    @property
    def staged(self) -> Span:
        return Span(self.start, self.start + self.elements.size)


# NCCL copies a buffer that starts at no multiple of 16 bytes one byte a load (``reduceCopy`` in
# src/device/common_kernel.h, v2.20 to v2.30). Runs are multiples of 8 elements in the models that
# people train; messages of 8 elements or a multiple start the next one where it is aligned.
_ALIGNED = 8


def gather_message(elements: int, segments: int) -> int:
    """Elements of a message of segments to their home: with a flag for each, rounded up."""
    return -(-(elements + segments) // _ALIGNED) * _ALIGNED
