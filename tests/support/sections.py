"""Weights that tests describe, and their sections."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_muon.planning.layout import Parameter, Span
from megatron_muon.planning.sections import Rows, Sections, whole_matrix


def whole_parameter(
    name: str,
    shape: tuple[int, int],
    dim: int | None = None,
    tp: int = 1,
    start: int = 0,
    bucket: Span | None = None,
) -> Parameter:
    """A weight of one matrix, of this local shape, at ``start`` of a buffer; alone in
    its bucket unless another is given.
    """
    matrices, blocks = whole_matrix(name, shape, dim, tp)
    span = Span(start, start + shape[0] * shape[1])
    return Parameter(name, shape, dim, bucket or span, span, 0, matrices, blocks)


def repeated(groups: int, group_rows: Sequence[tuple[str, int]]) -> Sections:
    """Rows that repeat group by group, e.g. (q, k, v) per query group: a matrix for
    each part.

    ``group_rows`` are ``(part, rows of it in one group)``.
    """
    return (tuple(Rows(part, count) for part, count in group_rows) * groups,)
