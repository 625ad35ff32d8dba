"""Sets of moments as sorted arrays of disjoint intervals, in microseconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Interval = tuple[float, float]


class Spans:
    """The union of intervals ``[start, stop)`` that come in any order."""

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self._merged: Any = np.empty((0, 2))
        self._new = [(start, stop) for start, stop in intervals if stop > start]

    def add(self, start: float, stop: float) -> None:
        """Add an interval; an empty one changes nothing."""
        if stop > start:
            self._new.append((start, stop))

    def edges(self) -> Any:
        """An ascending array: start, stop, start, stop, ..."""
        if self._new:
            pairs = np.concatenate([self._merged, self._new])
            pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
            reach = np.maximum.accumulate(pairs[:, 1])
            gaps = np.flatnonzero(pairs[1:, 0] > reach[:-1])
            starts, stops = (
                pairs[np.r_[0, gaps + 1], 0],
                reach[np.r_[gaps, len(reach) - 1]],
            )
            self._merged, self._new = np.c_[starts, stops], []
        return self._merged.ravel()

    def length(self, within: Spans | None = None) -> float:
        """Microseconds of the set, or of its intersection with another one."""
        mine = self.edges()
        edges = (within or self).edges()
        if not len(mine) or not len(edges):
            return 0.0
        sums = np.repeat(np.cumsum(edges[1::2] - edges[::2]), 2)
        before = np.interp(mine, edges, np.r_[0.0, sums[:-1]])
        return float((before[1::2] - before[::2]).sum())

    def common(self, other: Spans) -> Spans:
        """The intersection."""
        cuts = np.unique(np.concatenate([self.edges(), other.edges()]))
        here, there = (
            np.searchsorted(each.edges(), cuts[:-1], "right") for each in (self, other)
        )
        both = np.c_[cuts[:-1], cuts[1:]][here % 2 + there % 2 == 2]
        return Spans(both.tolist())
