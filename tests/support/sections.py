"""Sections of a weight that tests describe."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_muon.planning.sections import Rows, Sections


def repeated(groups: int, group_rows: Sequence[tuple[str, int]]) -> Sections:
    """Rows that repeat group by group, e.g. (q, k, v) per query group: a matrix for
    each part.

    ``group_rows`` are ``(part, rows of it in one group)``.
    """
    return (tuple(Rows(part, count) for part, count in group_rows) * groups,)
