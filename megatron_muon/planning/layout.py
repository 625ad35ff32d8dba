"""The places of elements, as plain integers: shards, and the matrices in a parameter.

A parameter is Megatron's: the local tensor-parallel slice, a flat range of a bucket. A
bucket is cut into ``dp_size`` equal shards. A matrix is one 2-D block that is
orthogonalized as a unit: a parameter holds one or several. With tensor parallelism, a
matrix is spread over the parameters of all TP ranks. Everything here is the same on
every rank of a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# in a block step's matrix: after the whole one's name, before the TP rank
SLICE_OF = "[tp "


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range of elements [start, stop)."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(
                f"a span needs 0 <= start <= stop, got [{self.start}, {self.stop})"
            )

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    @property
    def size(self) -> int:
        return self.stop - self.start

    def shift(self, offset: int) -> Span:
        return Span(self.start + offset, self.stop + offset)


UNPLACED = Span(0, 0)  # bucket and span of a parameter without a place in a buffer


def range_of(size: int, number: int, count: int) -> Span:
    """Range ``number`` of ``count`` nearly equal ones that ``size`` elements are cut
    into.
    """
    return Span(number * size // count, (number + 1) * size // count)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive local rows of a parameter that are consecutive rows of one of its
    matrices.
    """

    matrix: int  # index of the matrix in the parameter
    rows: Span  # the local rows of the parameter
    matrix_row: int  # the row of the whole matrix (TP = 1) at rows.start


@dataclass(frozen=True, slots=True)
class Strip:
    """A range of the long side of a matrix that several homes orthogonalize together.

    A strip of a wide matrix is a range of its columns, which has elements in every row.
    So its home receives a range of rows instead (``comes_as_rows``). The homes then
    exchange rows for columns (``runtime.exchange.sharers``), and the direction's
    columns for its rows. Other strips travel as they are iterated on.
    """

    rows: int  # rows, cols: size of the whole matrix over all TP ranks
    cols: int
    # number, count: which of the matrix's strips it is, and how many there are
    number: int
    count: int
    # where TP cuts a wide matrix's columns into a multiple of count, the TP ranks whose
    # column parts are its columns; None where its rows come
    parts: Span | None = None

    @property
    def comes_as_rows(self) -> bool:
        """Its home receives rows, and iterates on columns."""
        return self.rows < self.cols and self.parts is None

    @property
    def long(self) -> Span:
        """Its range of the long side, whatever comes to its home."""
        return range_of(max(self.rows, self.cols), self.number, self.count)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A whole matrix of a parameter, or a strip; in a plan also its place in it."""

    name: str  # its name in messages
    rows: int  # rows, cols: its size over all TP ranks
    cols: int
    # number of equal column ranges. Each TP rank holds a part of every range, in order.
    # More than one only where TP splits the columns of a gate and an up half.
    column_blocks: int = 1
    # each column range is a matrix of its own for Newton-Schulz and for the scale. They
    # travel together, since their elements alternate row by row.
    apart: bool = False
    # where several homes share a matrix, which range of it this is; rows and cols are
    # those of the elements that come to its home
    strip: Strip | None = None
    # its settings by pattern, KEY=VALUE,...; empty: those of the run
    own: str = ""
    # number of equal column ranges that staging lays out one after another; each holds
    # some of every column block
    column_parts: int = 1
    home: int = 0  # rank of the stage that orthogonalizes it
    parameter: int = 0  # index of its parameter in the plan

    @property
    def units(self) -> int:
        """How many matrices Newton-Schulz takes it as."""
        return self.column_blocks if self.apart else 1

    @property
    def unit(self) -> tuple[int, int]:
        """(rows, cols) of each of these."""
        return self.rows, self.cols // self.units

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

    def held_by(self, column_parts: int) -> Span:
        """The TP ranks that hold its columns, of as many as cut those of its
        parameter.
        """
        if self.strip is None or self.strip.parts is None:
            return Span(0, column_parts)
        return self.strip.parts


@dataclass(frozen=True, slots=True)
class Parameter:
    """A Muon parameter as a stage sees it: identical on every rank but for its TP
    slice.
    """

    name: str  # Megatron's parameter name, with experts numbered over all EP ranks
    # local (rows, cols), the same on every TP rank. A batch of matrices in one
    # parameter counts as all their rows, one matrix after another.
    shape: tuple[int, int]
    # the dim that tensor parallelism splits, None where TP ranks hold replicas
    partition_dim: int | None
    bucket: Span  # the bucket's elements within its grad buffer
    span: Span  # the parameter's elements within the same buffer
    buffer: int  # index of the grad buffer
    matrices: tuple[Matrix, ...]  # the whole matrices in it
    # for each TP rank, its local rows as rows of the matrices
    blocks: tuple[tuple[Block, ...], ...]
    ep_rank: int = 0  # the expert-parallel rank that has it; 0 for dense parameters

    @property
    def column_parts(self) -> int:
        """The number of column ranges that TP cuts each matrix into."""
        return len(self.blocks) if self.partition_dim == 1 else 1

    def part_of(self, matrix: Matrix) -> str:
        """What is in brackets behind its name in that of a matrix in it, or of a TP
        slice of one; else empty.
        """
        whole = matrix.name.removeprefix(self.name).partition(SLICE_OF)[0]
        return whole.partition("[")[2].partition("]")[0]

    @property
    def replicated(self) -> bool:
        return self.partition_dim is None and len(self.blocks) > 1

    def shards(self, dp_size: int) -> Iterator[tuple[int, Span]]:
        """``(dp_rank, elements of the parameter)`` for each shard that has some of it.

        Megatron cuts each bucket into ``dp_size`` equal shards
        (``DistributedOptimizer._build_model_gbuf_range``), wherever parameters begin or
        end.
        """
        if self.bucket.size % dp_size:
            raise ValueError(
                f"bucket of {self.bucket.size} elements around {self.name} does not "
                f"divide into {dp_size} equal shards"
            )
        shard_size = self.bucket.size // dp_size
        start, stop = (
            self.span.start - self.bucket.start,
            self.span.stop - self.bucket.start,
        )
        for dp_rank in range(start // shard_size, (stop - 1) // shard_size + 1):
            first, last = dp_rank * shard_size, (dp_rank + 1) * shard_size
            yield dp_rank, Span(max(first, start) - start, min(last, stop) - start)


Matrices = tuple[tuple[Matrix, ...], tuple[tuple[Block, ...], ...]]
