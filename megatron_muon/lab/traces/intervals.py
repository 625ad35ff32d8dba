"""Sets of moments as sorted lists of disjoint intervals, in microseconds, 16 bytes for each."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator

Interval = tuple[float, float]
_BATCH = 1 << 16  # intervals out of order that are held before they are merged


class Union:
    """The union of intervals that come in any order; fast and small where they come in order."""

    def __init__(self) -> None:
        self._starts = array("d")
        self._stops = array("d")
        self._late: list[Interval] = []

    def add(self, start: float, stop: float) -> None:
        """Add ``[start, stop)``; an empty one changes nothing."""
        if stop <= start:
            return
        if not self._starts or start > self._stops[-1]:
            self._starts.append(start)
            self._stops.append(stop)
        elif start >= self._starts[-1]:
            self._stops[-1] = max(self._stops[-1], stop)
        else:
            self._late.append((start, stop))
            if len(self._late) > max(_BATCH, len(self._starts) // 4):
                self._merge()

    def __iter__(self) -> Iterator[Interval]:
        """The disjoint intervals of the union, in order."""
        self._merge()
        return zip(self._starts, self._stops, strict=True)

    def __len__(self) -> int:
        self._merge()
        return len(self._starts)

    def _merge(self) -> None:
        if not self._late:
            return
        late, self._late = sorted(self._late), []
        before = zip(self._starts, self._stops, strict=True)
        self._starts, self._stops = array("d"), array("d")
        for start, stop in heapq.merge(before, late):
            self.add(start, stop)


def union(intervals: Iterable[Interval]) -> Union:
    """The union of intervals."""
    whole = Union()
    for start, stop in intervals:
        whole.add(start, stop)
    return whole


def length(intervals: Iterable[Interval]) -> float:
    """Microseconds in disjoint intervals."""
    return sum(stop - start for start, stop in intervals)


def common(left: Iterable[Interval], right: Iterable[Interval]) -> Union:
    """The intersection of two sets of disjoint, sorted intervals."""
    return union(_common(iter(left), iter(right)))


def _common(left: Iterator[Interval], right: Iterator[Interval]) -> Iterator[Interval]:
    here, there = next(left, None), next(right, None)
    while here is not None and there is not None:
        start, stop = max(here[0], there[0]), min(here[1], there[1])
        if start < stop:
            yield start, stop
        if here[1] < there[1]:
            here = next(left, None)
        else:
            there = next(right, None)
