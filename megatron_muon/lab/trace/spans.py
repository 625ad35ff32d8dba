"""Sets of moments as their edges in microseconds: start, stop, start, stop, ..."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Interval = tuple[float, float]
Edges = Any  # an ascending array of floats


def union(intervals: Iterable[Interval]) -> Edges:
    """The union of intervals ``[start, stop)`` that come in any order."""
    return _covered(np.array(list(intervals), dtype=float).ravel(), 1)


def common(first: Edges, other: Edges) -> Edges:
    """The intersection of two sets."""
    return _covered(np.concatenate([first, other]), 2)


def _covered(edges: Edges, times: int) -> Edges:
    """The moments that lie within at least so many of the intervals."""
    order = np.argsort(edges, kind="stable")
    depth = np.cumsum(np.where(order % 2 == 0, 1, -1))  # starts are at even places
    changes = np.diff(depth >= times, prepend=False)
    return edges[order][changes]


def length(edges: Edges) -> float:
    """Microseconds of a set."""
    return float((edges[1::2] - edges[::2]).sum())
