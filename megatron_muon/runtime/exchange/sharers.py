"""Messages between the homes of one matrix: numbers, squares, and rows of a wide matrix
for columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, product
from typing import Literal

import torch
from torch import Tensor, split_with_sizes

from megatron_muon.planning.layout import Matrix, Span, range_of
from megatron_muon.runtime import collectives
from megatron_muon.runtime.collectives import Place, Route, consecutive
from megatron_muon.runtime.exchange.meter import Meter

# blocks in which rows of one strip cross columns of another, by the strips' numbers
_Crossings = dict[tuple[int, int], Tensor]
# what each home has a range of: numbers of strips, or rows of squares
_What = Literal["strips", "rows"]


class Sharers:
    """The homes of a matrix's strips, and their messages (``strips.Sharing``).

    Squares are cut into ranges of rows, one for each strip: its home receives them of
    all others' squares, adds them, and sends the sum to them. So each sends and
    receives two squares a strip at most, and all have the same bits. Where homes also
    make rows of squares, each sends its rows to the others: a square at most each time.

    A wide matrix may come in ranges of its rows, whose elements are contiguous
    everywhere. Its homes then exchange rows for columns: where strip a's rows and strip
    b's columns cross, the home of one has the elements and that of the other needs
    them. Each sends and receives its own strip at most, there and back.

    Args:
        strips: all of the matrix's strips, in order.
        rank: of the stage.
        route: makes this rank's messages from the places of what is sent and received.
        meter: counts the bytes sent.
    """

    def __init__(
        self,
        strips: Sequence[Matrix],
        rank: int,
        route: Callable[[Sequence[Place], Sequence[Place]], Route],
        meter: Meter,
    ) -> None:
        self._rank, self._route, self._meter = rank, route, meter
        self._rows = [strip.rows for strip in strips]
        self._cols = [strip.long for strip in strips]
        self.count = len(strips)
        strips_of: dict[int, list[int]] = defaultdict(list)
        for number, strip in enumerate(strips):
            strips_of[strip.home].append(number)
        self.numbers = strips_of[rank]
        self._others = [home for home in strips_of if home != rank]
        self._theirs = [strips_of[other] for other in self._others]
        # by home, in order: its strips are neighbours, and so are their rows
        self._ranges: dict[_What, dict[int, Span]] = {"strips": {}, "rows": {}}
        short = min(strips[0].whole)
        for home, own in strips_of.items():
            first = range_of(short, own[0], self.count)
            last = range_of(short, own[-1], self.count)
            self._ranges["strips"][home] = Span(own[0], own[-1] + 1)
            self._ranges["rows"][home] = Span(first.start, last.stop)
        # made at first use, for all steps
        self._gather_route = cache(self._route_of_gather)
        self._sum_route = cache(self._route_of_sum)

    def all_numbers(self, mine: Tensor) -> Tensor:
        """The numbers of all strips, ``(strips, k)``, from those of the strips here."""
        return self._gathered("strips", mine)

    def add(self, squares: Sequence[Tensor]) -> Tensor:
        """This home's rows of the sum of all strips' squares, ``(rows, m)``, from the
        squares of those that are here, ``(m, m)`` and contiguous.
        """
        ranges, width = self._ranges["rows"], squares[0].size(1)
        sent = squares[0]
        if len(squares) > 1 and self._others:  # what another gets is one message
            parts: list[Tensor] = []
            for own in ranges.values():
                parts += [square[own.start : own.stop] for square in squares]
            sent = torch.cat(parts)
        route = self._sum_route(width)
        self._meter.square_bytes += route.sent * sent.element_size()
        pending = collectives.start_messages("muon/share", sent.view(-1), route)
        mine = ranges[self._rank]
        here = [square[mine.start : mine.stop] for square in squares]
        by_strip = dict(zip(self.numbers, here, strict=True))
        if pending is not None:
            theirs = pending.wait().view(-1, mine.size, width)
            by_strip |= zip(chain.from_iterable(self._theirs), theirs, strict=True)
        total = torch.zeros_like(here[0], dtype=torch.float32)
        for number in range(self.count):
            total.add_(by_strip[number])
        return total.to(sent.dtype)

    def together(self, rows: Tensor) -> Tensor:
        """``(m, m)`` from each home's rows, which are received where they belong.

        Args:
            rows: this home's, ``(rows, m)``, contiguous.
        """
        return self._gathered("rows", rows)

    def rows_to_columns(self, by_rows: Sequence[Tensor]) -> list[Tensor]:
        """The strips' columns of a wide matrix, from their rows.

        Args:
            by_rows: ``(rows of the strip, cols)`` of each strip that is here; the dims
                after the first one may be several.

        Returns:
            ``(rows, columns of the strip)`` of each of them, contiguous.
        """
        return list(self._recut([strip.flatten(1) for strip in by_rows], 1))

    def columns_to_rows(
        self, by_cols: Sequence[Tensor], into: Sequence[Tensor]
    ) -> None:
        """The inverse of ``rows_to_columns``, into tensors laid out as its argument."""
        for strip, rows in zip(into, self._recut(by_cols, 0), strict=True):
            strip.copy_(rows.view(strip.shape))

    def _recut(self, strips: Sequence[Tensor], dim: int) -> Iterator[Tensor]:
        """Ranges of the other dim, from the strips here, cut along ``dim``."""
        crossings: _Crossings = {}
        for a, strip in zip(self.numbers, strips, strict=True):
            parts = split_with_sizes(strip, (self._rows, self._cols)[dim], dim)
            crossings |= {(a, b): part for b, part in enumerate(parts)}
        made = self._swapped(crossings, dim)
        for b in self.numbers:
            yield torch.cat([made[a, b] for a in range(self.count)], 1 - dim)

    def _swapped(self, crossings: _Crossings, dim: int) -> _Crossings:
        """The blocks ``(any strip, a strip here)``, from ``(a strip here, any strip)``.

        The homes send each other the blocks that these lack.
        """
        own = self.numbers
        made = {key: crossings[key] for key in product(own, own)}
        if not self._others:
            return made
        outgoing = [list(product(own, strips)) for strips in self._theirs]
        incoming = [list(product(strips, own)) for strips in self._theirs]

        def shape_of(before: int, after: int) -> tuple[int, int]:
            row, col = (before, after) if dim == 1 else (after, before)
            return self._rows[row], self._cols[col]

        def sizes(keys: Sequence[tuple[int, int]]) -> list[int]:
            return [math.prod(shape_of(*key)) for key in keys]

        def places_of(keys: Sequence[list[tuple[int, int]]]) -> list[Place]:
            totals = [sum(sizes(of_other)) for of_other in keys]
            return consecutive(list(zip(self._others, totals, strict=True)))

        keys = list(chain.from_iterable(outgoing))
        sent = crossings[own[0], own[0]].new_empty(sum(sizes(keys)))
        places = split_with_sizes(sent, sizes(keys))
        for key, place in zip(keys, places, strict=True):
            place.view(shape_of(*key)).copy_(crossings[key])
        self._meter.turn_bytes += sent.nbytes
        route = self._route(places_of(outgoing), places_of(incoming))
        pending = collectives.start_messages("muon/turn", sent, route)
        assert pending is not None
        keys = list(chain.from_iterable(incoming))
        parts = split_with_sizes(pending.wait(), sizes(keys))
        for key, part in zip(keys, parts, strict=True):
            made[key] = part.view(shape_of(*key))
        return made

    def _gathered(self, what: _What, mine: Tensor) -> Tensor:
        """``(n, k)`` of all homes, from ``mine`` of this one, which is contiguous."""
        width = mine.size(1)
        route = self._gather_route(what, width)
        self._meter.square_bytes += route.sent * mine.element_size()
        pending = collectives.start_messages("muon/share", mine.view(-1), route)
        if pending is None:
            return mine
        own = self._ranges[what][self._rank]
        made = pending.wait().view(-1, width)
        made[own.start : own.stop] = mine
        return made

    def _route_of_gather(self, what: _What, width: int) -> Route:
        """Each home's rows of this width go to all others."""
        places = [
            (home, own.start * width, own.stop * width)
            for home, own in self._ranges[what].items()
        ]
        size = self._ranges[what][self._rank].size * width
        return self._route([(other, 0, size) for other in self._others], places)

    def _route_of_sum(self, width: int) -> Route:
        """Each strip's rows of a square of this width go to the home that adds them."""
        ranges, each = self._ranges["rows"], len(self.numbers) * width
        sent = [
            (home, own.start * each, own.stop * each) for home, own in ranges.items()
        ]
        size = ranges[self._rank].size * width
        counts = [
            (other, len(numbers) * size)
            for other, numbers in zip(self._others, self._theirs, strict=True)
        ]
        return self._route(sent, consecutive(counts))
