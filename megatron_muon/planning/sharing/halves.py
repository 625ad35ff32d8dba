"""The order of operations at a home that makes rows of squares, as plain data.

The order is that of ``orthogonalize.strips``. Half of a square travels while the other
half is multiplied, so how long a home waits follows from the order. ``strip_time`` runs
it in integers, ``pricing.strips`` on any hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple, TypeVar

from megatron_muon.orthogonalize.iteration import halves, makes_rows, strips_take_gram
from megatron_muon.orthogonalize.numerics import Numerics, Steps

# square: half of XXᵀ of a strip. sum: its rows, added over strips. product: rows of a
# product of squares. diagonal: rows of the first Q. apply: rows of QX, or of aX + BX.
Kind = Literal["square", "sum", "product", "diagonal", "apply"]


class Operation(NamedTuple):
    """What is made of one half of a square's columns, or of all."""

    kind: Kind
    half: int  # 0 or 1
    after: int | None = None  # the number of the message that it waits for
    sends: bool = False  # whether the half travels when it is made


Time = TypeVar("Time", float, Fraction)


def run(
    segment: Sequence[Operation],
    compute: Callable[[Operation], Time],
    travel: Callable[[Operation], Time],
    start: Time,
) -> Time:
    """When a segment's last operation ends, at a home whose others do the same.

    Args:
        compute: the time of an operation.
        travel: the time of the message that an operation sends. They travel one after
            another.
        start: of the first operation.
    """
    computed = sent = start
    arrivals: list[Time] = []
    for one in segment:
        if one.after is not None:
            computed = max(computed, arrivals[one.after])
        computed += compute(one)
        if one.sends:
            sent = max(sent, computed) + travel(one)
            arrivals.append(sent)
    return computed


def operations(
    rows: int, cols: int, count: int, numerics: Numerics
) -> Iterator[list[Operation]]:
    """Those of each step of the standard iteration, or of each Gram segment; none
    where homes make no rows.
    """
    if not makes_rows(rows, cols, count, numerics):
        return
    takes_gram = strips_take_gram(rows, cols, count, numerics)
    steps = [(step,) for step in numerics.steps]
    for part in numerics.segments if takes_gram else steps:
        yield _Segment(len(halves(min(rows, cols)))).of(part, takes_gram=takes_gram)


class _Segment:
    """The operations of a segment, of which a message is known by its number.

    Args:
        parts: in how many a square travels, 1 or 2.
    """

    def __init__(self, parts: int) -> None:
        self._free: tuple[None, ...] = (None,) * parts
        self._made: list[Operation] = []
        self._messages = 0

    def of(self, steps: Steps, *, takes_gram: bool) -> list[Operation]:
        squares = self._both("square", self._free, sends=True)
        gram = self._both("sum", squares, sends=True)
        factor: Sequence[int] = ()
        for step, (_, _, c) in enumerate(steps):
            is_last = step == len(steps) - 1
            power = gram
            if c != 0:
                sends = len(steps) > 1 or not takes_gram
                power = self._both("product", gram, sends=sends)
            if not is_last:
                self._both("product", power)
                gram = self._both("product", power, sends=True)
            if not takes_gram:
                factor = power
            elif step == 0:
                factor = self._both("diagonal", self._free, sends=is_last)
            else:
                factor = self._both("product", power, sends=is_last)
        self._both("apply", factor)
        return self._made

    def _both(
        self, kind: Kind, after: Sequence[int | None], *, sends: bool = False
    ) -> Sequence[int]:
        """Both halves; the numbers of their messages."""
        first = self._messages
        for half, message in enumerate(after):
            self._made.append(Operation(kind, half, message, sends))
            self._messages += sends
        return range(first, self._messages)
