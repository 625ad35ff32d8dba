"""Sets of moments as sorted arrays of disjoint intervals, in microseconds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

Interval = tuple[float, float]
_BATCH = 1 << 17  # numbers that wait to be merged


class Spans:
    """The union of intervals ``[start, stop)`` that come in any order."""

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self._merged: Any = np.empty(0)
        self._new = array("d")
        for start, stop in intervals:
            self.add(start, stop)

    def add(self, start: float, stop: float) -> None:
        """Add an interval; an empty one changes nothing."""
        if stop > start:
            self._new.extend((start, stop))
            if len(self._new) > max(_BATCH, len(self._merged)):
                self.edges()

    def edges(self) -> Any:
        """An ascending array: start, stop, start, stop, ..."""
        if self._new:
            pairs = np.concatenate([self._merged, self._new]).reshape(-1, 2)
            pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
            reach = np.maximum.accumulate(pairs[:, 1])
            gaps = np.flatnonzero(pairs[1:, 0] > reach[:-1])
            starts, stops = pairs[np.r_[0, gaps + 1], 0], reach[np.r_[gaps, len(reach) - 1]]
            self._merged, self._new = np.c_[starts, stops].ravel(), array("d")
        return self._merged

    def length(self, within: Spans | None = None) -> float:
        """Microseconds of the set, or of its intersection with another one."""
        mine, edges = self.edges(), (within or self).edges()
        if not len(mine) or not len(edges):
            return 0.0
        sums = np.repeat(np.cumsum(edges[1::2] - edges[::2]), 2)
        before = np.interp(mine, edges, np.r_[0.0, sums[:-1]])
        return float((before[1::2] - before[::2]).sum())

    def common(self, other: Spans) -> Spans:
        """The intersection."""
        cuts = np.unique(np.concatenate([self.edges(), other.edges()]))
        here, there = (np.searchsorted(each.edges(), cuts[:-1], "right") for each in (self, other))
        both = Spans()
        both._new.frombytes(np.c_[cuts[:-1], cuts[1:]][here % 2 + there % 2 == 2].tobytes())
        return both
