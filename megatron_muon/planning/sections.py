"""Weights whose rows belong to several matrices, and what TP ranks hold of them.

A fused weight is a list of sections: TP cuts each section into equal ranges of rows,
and a rank holds its range of every section, one after another. A gated fc1 has two
(gate, up), a fused QKV one, in which q, k and v repeat per query group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from megatron_muon.planning.layout import Block, Matrices, Matrix, Span


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a whole weight (TP = 1) that belong to one of its
    matrices.
    """

    # the matrix, by its name within the weight; empty where the weight is one matrix
    part: str
    count: int  # number of rows


# All rows of a whole weight, in order; see the module's docstring.
Sections = tuple[tuple[Rows, ...], ...]


def whole_matrix(
    name: str, shape: tuple[int, int], partition_dim: int | None, tp_size: int
) -> Matrices:
    """The parameter is one matrix; TP slices it into equal ranges of rows or columns,
    or not.
    """
    rows = shape[0] * (tp_size if partition_dim == 0 else 1)
    return sectioned(name, shape, partition_dim, tp_size, ((Rows("", rows),),))


def sectioned(
    name: str,
    shape: tuple[int, int],
    partition_dim: int | None,
    tp_size: int,
    sections: Sections,
) -> Matrices:
    """A weight whose rows belong to several matrices. A matrix has its rows in their
    order.

    Args:
        name: the weight's name.
        shape: local (rows, cols).
        partition_dim: the dim that TP splits; None where TP ranks hold replicas.
        tp_size: number of TP ranks.
        sections: the rows over all TP ranks.

    Raises:
        ValueError: the sections have another number of rows, or TP cannot split one
            equally.
    """
    rows, cols = shape
    parts = tp_size if partition_dim == 0 else 1
    counts = [sum(run.count for run in section) for section in sections]
    if sum(counts) != rows * parts:
        raise ValueError(
            f"{name}: {rows} rows on each of {parts} TP ranks are not the "
            f"{sum(counts)} of {', '.join(_named(sections))}"
        )
    for section, count in zip(sections, counts, strict=True):
        if count % parts:
            raise ValueError(
                f"{name}: {tp_size} TP ranks cannot hold equal parts of the {count} "
                f"rows of {', '.join(_named([section]))}"
            )
    width = cols * (tp_size if partition_dim == 1 else 1)
    size: dict[str, int] = {}
    whole = [list(_blocks_of(section, size)) for section in sections]
    order = {part: index for index, part in enumerate(size)}
    matrices = tuple(
        Matrix(f"{name}[{part}]" if part else name, count, width)
        for part, count in size.items()
    )
    blocks = tuple(
        tuple(_held_rows(whole, order, parts, tp_rank if parts > 1 else 0))
        for tp_rank in range(tp_size)
    )
    return matrices, blocks


def _named(sections: Sequence[Sequence[Rows]]) -> list[str]:
    runs = chain.from_iterable(sections)
    names = dict.fromkeys(run.part or "one matrix" for run in runs)
    return list(names) if len(names) <= 6 else [*list(names)[:5], "..."]


def _blocks_of(
    section: Sequence[Rows], size: dict[str, int]
) -> Iterator[tuple[Rows, int, int]]:
    """``(rows, their start in the section, their first row in the matrix)``; counts
    ``size`` on.
    """
    start = 0
    for run in section:
        yield run, start, size.setdefault(run.part, 0)
        start += run.count
        size[run.part] += run.count


def _held_rows(
    sections: Sequence[Sequence[tuple[Rows, int, int]]],
    order: dict[str, int],
    parts: int,
    part: int,
) -> list[Block]:
    """The blocks of one TP rank; neighbours that continue each other in a matrix are
    one.
    """
    blocks: list[Block] = []
    local = 0
    for section in sections:
        rows = sum(run.count for run, _, _ in section) // parts
        for run, start, matrix_row in section:
            first = max(start, part * rows)
            stop = min(start + run.count, (part + 1) * rows)
            if first >= stop:
                continue
            at = Span(local + first - part * rows, local + stop - part * rows)
            block = Block(order[run.part], at, matrix_row + first - start)
            if blocks and _continues(blocks[-1], block):
                before = blocks.pop()
                block = replace(before, rows=Span(before.rows.start, at.stop))
            blocks.append(block)
        local += rows
    return blocks


def _continues(one: Block, other: Block) -> bool:
    same = one.matrix == other.matrix and one.rows.stop == other.rows.start
    return same and one.matrix_row + one.rows.size == other.matrix_row
