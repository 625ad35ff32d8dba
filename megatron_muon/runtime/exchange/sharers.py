"""Messages between the homes of one matrix: numbers, squares, and rows of a wide matrix
for columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, product

import torch
from torch import Tensor, split_with_sizes

from megatron_muon.planning.layout import range_of
from megatron_muon.planning.slices import Matrix
from megatron_muon.runtime import collectives
from megatron_muon.runtime.collectives import Group, Pending, Route
from megatron_muon.runtime.exchange.meter import Meter

# blocks in which rows of one strip cross columns of another, by the strips' numbers
_Crossings = dict[tuple[int, int], Tensor]


class Arriving:
    """A tensor that messages under way complete (``strips.Arriving``)."""

    def __init__(self, complete: Callable[[], Tensor]) -> None:
        self._complete: Callable[[], Tensor] | None = complete
        self._tensor: Tensor | None = None

    def wait(self) -> Tensor:
        """The tensor; the first call waits for the messages, and forgets them."""
        if self._complete is not None:
            self._tensor, self._complete = self._complete(), None
        assert self._tensor is not None
        return self._tensor


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
        rank, group, world: rank of the stage, its group,
            ``collectives.world_ranks(group)``.
        meter: counts the bytes sent.
    """

    def __init__(
        self,
        strips: Sequence[Matrix],
        rank: int,
        group: Group,
        world: Sequence[int],
        meter: Meter,
    ) -> None:
        self._homes, self._rank = [strip.home for strip in strips], rank
        self._rows = [strip.rows for strip in strips]
        self._cols = [strip.long for strip in strips]
        self.count = len(strips)
        self.numbers = self._strips_at(rank)
        self._ranks = sorted(set(self._homes))
        self._others = [other for other in self._ranks if other != rank]
        self._theirs = [self._strips_at(other) for other in self._others]
        # of each square, the rows of each home's strips, which are neighbours
        short = min(strips[0].whole)
        self._rows_of = {}
        for home in self._ranks:
            own = self._strips_at(home)
            first = range_of(short, own[0], self.count)
            last = range_of(short, own[-1], self.count)
            self._rows_of[home] = slice(first.start, last.stop)
        self._group, self._world, self._meter = group, world, meter

    def all_numbers(self, mine: Tensor) -> Tensor:
        """The numbers of all strips, ``(strips, k)``, from those of the strips here."""
        every = self._start_of_all({rank: list(mine) for rank in self._ranks})
        return torch.stack(every())

    def start_sum(self, squares: Sequence[Tensor]) -> Arriving:
        """This home's rows of the sum of all strips' squares, ``(rows, k)``, from the
        squares of those that are here, ``(m, k)``.
        """
        parts = {
            rank: [square[own] for square in squares]
            for rank, own in self._rows_of.items()
        }
        of_all = self._start_of_all(parts)

        def added() -> Tensor:
            mine = parts[self._rank][0]
            total = torch.zeros_like(mine, dtype=torch.float32)
            for part in of_all():
                total.add_(part)
            return total.to(mine.dtype)

        return Arriving(added)

    def start_together(self, rows: Tensor) -> Arriving:
        """``(m, k)`` from each home's rows, which are received where they belong.

        Args:
            rows: this home's, ``(rows, k)``, contiguous.
        """
        if not self._others:
            return Arriving(lambda: rows)
        width = rows.size(1)
        places = {
            rank: (own.start * width, own.stop * width)
            for rank, own in self._rows_of.items()
        }
        route = Route.gather(self._group, self._world, self._rank, places)
        self._meter.square_bytes += len(self._others) * rows.nbytes
        pending = self._start("muon/share", rows.view(-1), route)

        def whole() -> Tensor:
            made = pending.wait().view(-1, width)
            made[self._rows_of[self._rank]] = rows
            return made

        return Arriving(whole)

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

        keys = list(chain.from_iterable(outgoing))
        sent = crossings[own[0], own[0]].new_empty(sum(sizes(keys)))
        places = split_with_sizes(sent, sizes(keys))
        for key, place in zip(keys, places, strict=True):
            place.view(shape_of(*key)).copy_(crossings[key])
        self._meter.turn_bytes += sent.nbytes
        to = [sum(sizes(some)) for some in outgoing]
        counts = [sum(sizes(some)) for some in incoming]
        pending = self._start("muon/turn", sent, self._route(to, counts))
        received = pending.wait()
        keys = list(chain.from_iterable(incoming))
        parts = split_with_sizes(received, sizes(keys))
        for key, part in zip(keys, parts, strict=True):
            made[key] = part.view(shape_of(*key))
        return made

    def _strips_at(self, rank: int) -> list[int]:
        """Numbers of the strips whose home a rank is."""
        return [number for number, home in enumerate(self._homes) if home == rank]

    def _start_of_all(
        self, given: Mapping[int, Sequence[Tensor]]
    ) -> Callable[[], list[Tensor]]:
        """Start to collect what all strips give to this home; the returned function
        waits for it, in the order of strips.

        Args:
            given: what each strip here gives, by the home that gets it. What a home
                gets has one shape.
        """
        own = given[self._rank]
        of_strips = dict(zip(self.numbers, own, strict=True))
        if not self._others:
            return lambda: [of_strips[number] for number in range(self.count)]
        parts: list[Tensor] = []
        for other in self._others:
            parts += [part.flatten() for part in given[other]]
        to = [len(own) * given[other][0].numel() for other in self._others]
        counts = [len(strips) * own[0].numel() for strips in self._theirs]
        sent = torch.cat(parts)
        self._meter.square_bytes += sent.nbytes
        pending = self._start("muon/share", sent, self._route(to, counts))

        def received() -> list[Tensor]:
            theirs = pending.wait().view(-1, *own[0].shape)
            of_all = of_strips | dict(
                zip(chain.from_iterable(self._theirs), theirs, strict=True)
            )
            return [of_all[number] for number in range(self.count)]

        return received

    def _route(self, to: Sequence[int], counts: Sequence[int]) -> Route:
        """Messages to and from the other homes, one after another in their buffers.

        Args:
            to, counts: numbers of elements by home, sent and received.
        """
        sent_to = list(zip(self._others, to, strict=True))
        taken = list(zip(self._others, counts, strict=True))
        return Route.of(self._group, self._world, self._rank, sent_to, taken)

    def _start(self, name: str, sent: Tensor, route: Route) -> Pending:
        pending = collectives.start_messages(name, sent, route)
        assert pending is not None
        return pending
