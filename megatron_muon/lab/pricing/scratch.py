"""Scratch memory of a round on a GPU: of Newton-Schulz, and of elementwise work on
lists.

Sizes are those of ``orthogonalize.newton_schulz`` and ``rules.muon``. Left out are
single numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from megatron_muon.lab.pricing.kernels import batches
from megatron_muon.lab.pricing.work import RoundWork
from megatron_muon.orthogonalize.iteration import (
    makes_rows,
    square_rows,
    squares_outside,
    strips_take_gram,
    takes_gram,
)
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.layout import Matrix
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rounds.cut import ELEMENTS_AT_ONCE, scratch_limit
from megatron_muon.rules.int8_momentum import AT_ONCE

_FP32 = 4


def of_newton_schulz(
    plan: ExchangePlan, works: Sequence[RoundWork], numerics: Numerics
) -> list[list[int]]:
    """Bytes beside the matrices themselves at Newton-Schulz's highest moment:
    ``[round][rank]``.

    Args:
        plan: of one optimizer.
        works: its rounds.
        numerics: of the run, on a GPU.
    """
    round_of = plan.round_of()
    strips: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
    for matrix in plan.matrices:
        if matrix.strip is not None:
            strips[round_of[matrix.parameter], matrix.home].append(matrix)
    limit = scratch_limit(plan.matrices)

    def highest(number: int, rank: int) -> int:
        most = _of_batches(works[number], rank, numerics, limit) * plan.itemsize
        for own in _by_matrix(strips[number, rank]):
            most = max(most, _of_strips(own, plan.size, numerics))
        return most

    return [
        [highest(number, rank) for rank in range(plan.size)]
        for number in range(len(works))
    ]


def of_momentum(elements: int, numerics: Numerics) -> int:
    """Bytes in which lists of inputs of Newton-Schulz are made, before they are
    rounded.
    """
    config = numerics.config
    if config.elementwise != "foreach" or not config.nesterov:
        return 0
    return _FP32 * min(elements, ELEMENTS_AT_ONCE)


def of_packing(plan: ExchangePlan, numerics: Numerics) -> list[list[int]]:
    """Bytes for the largest shard's momentum while it is packed: ``[round][rank]``."""
    packs = numerics.config.momentum_dtype != "fp32"
    round_of = plan.round_of()
    sizes = Counter[tuple[int, int]]()
    for one in plan.slices if packs else ():
        sizes[one.parameter, one.rank] += one.elements.size
    found = [[0] * plan.size for _ in plan.rounds]
    for (parameter, rank), size in sizes.items():
        here = found[round_of[parameter]]
        here[rank] = max(here[rank], 2 * _FP32 * min(size, AT_ONCE))
    return found


def of_update(elements: int, numerics: Numerics) -> int:
    """Bytes of directions in fp32; a list's copies are there until the next list's are
    made.
    """
    if numerics.config.elementwise != "foreach" or numerics.travels == "fp32":
        return 0
    return _FP32 * min(elements, 2 * ELEMENTS_AT_ONCE)


def _of_batches(work: RoundWork, rank: int, numerics: Numerics, limit: int) -> int:
    """Elements of scratch memory of the largest batch."""
    most, taken = 0, numerics.config.ns_batch
    for layout, count in work.layouts[rank].items():
        rows, cols = layout[:2]
        if layout.shared is not None:
            continue
        own = numerics.where(layout.own)
        for together, _ in batches(rows, cols, count, ns_batch=taken, scratch=limit):
            of_one = _of_one(rows, cols, own, alone=together == 1)
            most = max(most, together * of_one)
    return most


def _of_one(rows: int, cols: int, numerics: Numerics, *, alone: bool) -> int:
    """The next iterate and squares: two, or those of Gram's four that do not fit into a
    spare one.

    All may be in the spare one of a matrix that is ``alone``.
    """
    squares = 2
    if takes_gram(rows, cols, numerics):
        outside = squares_outside(rows, cols)
        squares = outside if alone else max(1, outside)
    return rows * cols + squares * min(rows, cols) ** 2


def _by_matrix(strips: Iterable[Matrix]) -> list[list[Matrix]]:
    """A home's strips by the matrix that they are of: those of one have consecutive
    numbers.
    """
    groups: list[list[Matrix]] = []
    after: tuple[int, ...] = ()
    for matrix in strips:
        strip = matrix.strip
        assert strip is not None
        if (*matrix.whole, strip.count, strip.number) != after:
            groups.append([])
        groups[-1].append(matrix)
        after = (*matrix.whole, strip.count, strip.number + 1)
    return groups


def _of_strips(own: Sequence[Matrix], size: int, numerics: Numerics) -> int:
    """Bytes for the strips of one matrix that are here: exchanged for columns,
    entered and iterated on.

    Args:
        own: the strips, in order; a home has neighbouring ones.
        size: number of ranks of the stage.
    """
    numerics = numerics.where(own[0].own)
    itemsize = numerics.itemsize
    elements = min(own[0].whole) * sum(matrix.long for matrix in own)
    # Copies in fp32, which are divided in place, and what they are rounded to.
    entering = elements * (_FP32 if itemsize == _FP32 else _FP32 + itemsize)
    highest = max(entering, elements * itemsize + _iterating(own, size, numerics))
    if not own[0].comes_as_rows:
        return highest
    there, columns, back = _exchanging(own, itemsize)
    return max(there, columns + highest, back)


def _exchanging(own: Sequence[Matrix], itemsize: int) -> tuple[int, int, int]:
    """Bytes while rows are exchanged for columns, of these columns, and while they are
    exchanged back.
    """
    strip = own[0].strip
    assert strip is not None
    rows = sum(matrix.rows for matrix in own)
    cols = sum(matrix.long for matrix in own)
    come, columns = itemsize * rows * strip.cols, itemsize * strip.rows * cols
    stays = itemsize * rows * cols
    flat = come if own[0].column_parts > 1 else 0  # their columns in order
    there = flat + columns - stays + max(come - stays, columns)
    return there, columns, columns + come - stays + max(columns - stays, come)


def _iterating(own: Sequence[Matrix], size: int, numerics: Numerics) -> int:
    """Bytes beside iterates: squares are added over the homes, then multiplied."""
    strip, short, itemsize = own[0].strip, min(own[0].whole), numerics.itemsize
    assert strip is not None
    # one strip's next iterate
    made = itemsize * short * max(matrix.long for matrix in own)
    square = itemsize * short * short
    by_rows = makes_rows(*own[0].whole, strip.count, numerics)
    takes_gram = strips_take_gram(*own[0].whole, strip.count, numerics)
    adding = _adding(own, size, itemsize, by_rows=by_rows)
    if by_rows:
        rows = _rows_here(own) * short * itemsize
        sent = rows if len(own) > 1 and min(size, strip.count) > 1 else 0
        parts = numerics.segments if takes_gram else []
        multiplying = 2 * square + 2 * rows + sent
        for part in parts:
            multiplying = max(multiplying, _making_rows(len(part), square, rows, sent))
        return max(adding, multiplying, made + square + rows)
    if takes_gram:
        multiplying = 4 * square
    else:
        multiplying = square * (1 + any(c != 0 for _, _, c in numerics.steps))
    return max(adding, multiplying, made + square)


def _rows_here(own: Sequence[Matrix]) -> int:
    """Number of rows of a square that the strips here make."""
    first, last = own[0].strip, own[-1].strip
    assert first is not None and last is not None
    short = min(own[0].whole)
    start, _ = square_rows(short, first.number, first.count)
    _, stop = square_rows(short, last.number, first.count)
    return stop - start


def _adding(own: Sequence[Matrix], size: int, itemsize: int, *, by_rows: bool) -> int:
    """Bytes while squares are added: those of the strips here, of several a copy that
    is sent, this home's rows of all others' squares, and its rows of the sum, in fp32
    and rounded.
    """
    strip, short = own[0].strip, min(own[0].whole)
    assert strip is not None
    numbers = short * _rows_here(own)
    square, part = itemsize * short * short, itemsize * numbers
    has_others = min(size, strip.count) > 1
    left = len(own) * square if has_others and len(own) > 1 else 0
    rounded = part if itemsize < _FP32 else 0  # a sum in fp32 is not copied
    summing = _FP32 * numbers + rounded
    return len(own) * square + (strip.count - len(own)) * part + left + summing


def _making_rows(steps: int, square: int, rows: int, sent: int) -> int:
    """Bytes of a Gram segment's squares in its highest step.

    Args:
        steps: number of the segment's steps.
        square: bytes of a square that has come together.
        rows: bytes of this home's rows of one.
        sent: bytes of a copy of those of several strips, which is sent.
    """
    if steps == 1:  # Q, of which P's rows are made
        return square + 2 * rows + sent
    # P and the next R, with the product between them or the first Q
    most = 2 * square + 3 * rows + sent
    return most + rows if steps > 2 else most  # another Q
