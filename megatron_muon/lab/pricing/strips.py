"""The time of one home of a matrix that several share, with the messages between
homes.

All homes do the same, so one home's clocks show when messages arrive. Number and order
of operations are ``orthogonalize.strips``' on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_muon.lab.pricing.hardware import MICRO, Hardware
from megatron_muon.lab.pricing.kernels import Cost, Products, stream
from megatron_muon.orthogonalize.iteration import (
    halves,
    makes_rows,
    strips_take_gram,
)
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.sharing.halves import Operation, operations, run

# Kernels of a strip in 16 bits, and bytes per element: largest entry, fp32 copy, its
# division, its norm, division and cast, copy back. And per byte of a square: sums
# in fp32, and a copy of the home's own rows.
_STRIP = 30
_STRIP_BYTES = 2 + (2 + 4) + (4 + 4) + 4 + (4 + 4) + (4 + 2) + 4
_SUM_BYTES = 6
# Per byte of a strip's rows that are exchanged for columns: into a message, out of it,
# and for the rows, half of these bytes, once more; each is read and written.
_EXCHANGE_BYTES = 5


@lru_cache(65536)
def newton_schulz_strip(
    hardware: Hardware,
    whole: tuple[int, int],
    long: int,
    count: int,
    homes: int,
    numerics: Numerics,
) -> Cost:
    """The cost to orthogonalize a strip of a matrix that several homes share, their
    messages too.

    Squares are added over the homes: each receives its rows of all others' squares and
    sends their sum to them. Where they make rows of squares, half of a square travels
    while the other half is multiplied. Nothing else hides messages. ``whole`` is the
    matrix, ``long`` the strip's length, ``count`` the number of strips.
    """
    short = min(whole)
    products = Products(hardware, short, long, 1, numerics)
    home = _Home(hardware, homes, products, -(-short // count))
    cost = stream(hardware, _STRIP_BYTES * short * long, _STRIP)
    cost += (home.message(0) + Cost(0.0, 2)).times(2)
    if makes_rows(*whole, count, numerics):
        beta = not strips_take_gram(*whole, count, numerics)
        for segment in operations(*whole, count, numerics):
            cost += home.segment(segment, beta=beta)
        return cost
    square = short * short * numerics.itemsize
    add = home.message(square).times(2) + home.sums(short)
    if not strips_take_gram(*whole, count, numerics):
        return cost + add.times(len(numerics.steps)) + products.standard_steps()
    for part in numerics.segments:
        cost += add + products.gram_segment([c != 0 for _, _, c in part])
    return cost


def rows_for_columns(hardware: Hardware, nbytes: int, homes: int) -> Cost:
    """The cost to exchange a strip's rows for columns, and back: copies and messages.

    Nothing hides the messages.

    Blocks are copied into a message, and those that come are put together; on the way
    back their rows are then copied to where they came from. ``nbytes`` are those of its
    rows and columns.
    """
    others = homes - 1
    travels = nbytes * others / homes / _link(hardware, homes)
    copies = stream(hardware, _EXCHANGE_BYTES * nbytes, 2 * others + 3)
    host = 4 * hardware.peer_host_us * others * MICRO
    return Cost(2 * _latency(hardware, homes) + travels, 2, host) + copies


@dataclass(frozen=True, slots=True)
class _Home:
    """One of the homes of a matrix, which makes ``rows`` of each square."""

    hardware: Hardware
    homes: int
    products: Products
    rows: int

    def segment(self, segment: Sequence[Operation], *, beta: bool) -> Cost:
        """The cost of a Gram segment or of a step, where homes make rows of squares.

        Args:
            beta: whether QX has a linear term.
        """
        short = self.products.short
        widths = [stop - start for start, stop in halves(short)]
        costs = {one: self._made(one, widths, beta=beta) for one in segment}
        sent = [self.message(short * each * self._itemsize) for each in widths]
        seconds = run(
            segment,
            compute=lambda one: costs[one].seconds,
            travel=lambda one: sent[one.half].seconds,
            start=0.0,
        )
        others = [costs[one] for one in segment]
        others += [sent[one.half] for one in segment if one.sends]
        launches = sum(each.launches for each in others)
        return Cost(seconds, launches, sum(each.host for each in others))

    def message(self, nbytes: float) -> Cost:
        """A square or a part of it, of which each home sends its share to the
        others.
        """
        share = (self.homes - 1) / self.homes
        travels = nbytes * share / _link(self.hardware, self.homes)
        host = 2 * self.hardware.peer_host_us * (self.homes - 1) * MICRO
        return Cost(_latency(self.hardware, self.homes) + travels, 1, host)

    def sums(self, width: int) -> Cost:
        """The cost of adding squares, ``width`` of their columns."""
        nbytes = self.products.short * width * self._itemsize
        return stream(self.hardware, _SUM_BYTES * nbytes, self.homes + 3)

    def _made(self, one: Operation, widths: Sequence[int], *, beta: bool) -> Cost:
        """The cost of one operation, and of the copies of what it sends."""
        products, rows = self.products, self.rows
        short, long, width = products.short, products.long, widths[one.half]
        sent = products.copy(rows * width).times(2 * one.sends)
        match one.kind:
            case "square":
                made = products.square(width, long)
                if one.half:  # and what is above it, copied
                    return made + products.copy(widths[0] * width)
                below = sum(widths[1:])
                return made + products.product(below, width, long) if below else made
            case "sum":
                made = self.sums(width)
                is_last = one.half == len(widths) - 1  # all rows are put together
                return made + products.copy(rows * short) if is_last else made
            case "product":
                made = products.product(rows, width, short) + sent
                made += products.copy(rows * width)
            case "diagonal":
                made = products.copy(rows * width) + stream(self.hardware, 0) + sent
            case "apply":
                made = products.product(width, long, short)
                if beta:
                    made += products.copy(width * long)
        return made

    @property
    def _itemsize(self) -> int:
        """Bytes of an element of a square."""
        return self.products.numerics.itemsize


def _latency(hardware: Hardware, homes: int) -> float:
    """Seconds of a message from each home to each other one, without its bytes."""
    return (hardware.message_us + hardware.peer_us * (homes - 1)) * MICRO


def _link(hardware: Hardware, homes: int) -> float:
    """Bytes a second between homes: they are neighbours, of one node where it holds
    whole teams.
    """
    near = hardware.gpus_per_node % homes == 0
    return hardware.node_link if near else hardware.network_link
