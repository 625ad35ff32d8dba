"""The time of one home of a matrix that several share, with the messages between
homes.

All homes do the same, so one home's clocks show when messages arrive. Number and order
of operations are ``orthogonalize.strips``' on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_muon.lab.pricing.hardware import MICRO, Hardware
from megatron_muon.lab.pricing.kernels import Cost, Products, stream
from megatron_muon.orthogonalize.iteration import makes_rows, strips_take_gram
from megatron_muon.orthogonalize.numerics import Numerics, Steps

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
    sends their sum to them. Nothing hides messages. ``whole`` is the matrix, ``long``
    the strip's length, ``count`` the number of strips.
    """
    short = min(whole)
    products = Products(hardware, short, long, 1, numerics)
    home = _Home(hardware, homes, products, -(-short // count))
    cost = stream(hardware, _STRIP_BYTES * short * long, _STRIP)
    cost += (home.message(0) + Cost(0.0, 2)).times(2)
    takes_gram = strips_take_gram(*whole, count, numerics)
    if makes_rows(*whole, count, numerics):
        steps = [(step,) for step in numerics.steps]
        for part in numerics.segments if takes_gram else steps:
            cost += home.added() + home.rows_of(part, takes_gram=takes_gram)
    elif takes_gram:
        for part in numerics.segments:
            cost += home.added() + products.gram_segment([c != 0 for _, _, c in part])
    else:
        cost += home.added().times(len(numerics.steps)) + products.standard_steps()
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

    def rows_of(self, steps: Steps, *, takes_gram: bool) -> Cost:
        """The cost of a Gram segment or of a step, without the sum of squares, where
        homes make rows of squares.
        """
        products, rows = self.products, self.rows
        short, long = products.short, products.long
        linear = products.copy(rows * short)
        made = products.product(rows, short, short) + linear
        sent = self.message(short * short * self._itemsize) + linear
        cost = products.square(short, long) + products.product(short, long, short)
        powers = sum(c != 0 for _, _, c in steps)
        if not takes_gram:  # P, and the linear term of BX
            return cost + (made + sent).times(powers) + products.copy(short * long)
        # P, which only its home needs if there is one step; the next R, by way of half
        # of it; Q, which at first is P plus a diagonal
        cost += made.times(powers)
        cost += sent.times(powers) if len(steps) > 1 else Cost()
        cost += (made.times(3) + sent).times(len(steps) - 1)
        return cost + linear + stream(self.hardware, 0) + sent

    def message(self, nbytes: float) -> Cost:
        """A square or a part of it, of which each home sends its share to the
        others.
        """
        share = (self.homes - 1) / self.homes
        travels = nbytes * share / _link(self.hardware, self.homes)
        host = 2 * self.hardware.peer_host_us * (self.homes - 1) * MICRO
        return Cost(_latency(self.hardware, self.homes) + travels, 1, host)

    def added(self) -> Cost:
        """The cost of a sum of squares, whose rows are put together."""
        square = self.products.short**2 * self._itemsize
        sums = stream(self.hardware, _SUM_BYTES * square, self.homes + 3)
        return self.message(square).times(2) + sums

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
