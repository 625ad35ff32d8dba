"""Scratch memory of a round: that of Newton-Schulz, and of elementwise work on lists.

Sizes are those of ``orthogonalize.newton_schulz`` and ``runtime.update``. A GPU takes matrices in
batches and holds them in the dtype in which they travel. A CPU takes one at a time and enters it in
fp32; without bf16 instructions it holds every iterate in fp32, too.

Left out are single numbers, and on a CPU 14 KiB in which torch turns a transposed copy, and what
oneDNN's bf16 product takes where there are such instructions: 97 to 193 KiB a thread for products
of 256 to 2048.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron_muon.lab.pricing.kernels import batches
from megatron_muon.lab.pricing.work import RoundWork
from megatron_muon.orthogonalize.iteration import (
    is_tight,
    makes_rows,
    square_rows,
    squares_outside,
    strips_take_gram,
    takes_gram,
)
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rounds.cut import ELEMENTS_AT_ONCE, scratch_limit
from megatron_muon.planning.slices import Matrix

_FP32 = 4
_BYTES = {"bf16": 2, "fp16": 2, "fp32": _FP32}


def of_newton_schulz(
    plan: ExchangePlan, works: Sequence[RoundWork], numerics: Numerics
) -> list[list[int]]:
    """Bytes beside the matrices themselves at Newton-Schulz's highest moment: ``[round][rank]``.

    Args:
        plan: of one optimizer.
        works: its rounds.
        numerics: of the run.
    """
    if not numerics.on_gpu:
        return [
            [_most_on_cpu(matrices, plan.size, numerics) for matrices in ranks]
            for ranks in _homed(plan)
        ]
    limit = scratch_limit(plan.matrices)
    return [
        [
            max(
                _of_batches(work, rank, numerics, limit) * plan.itemsize,
                max((of_strips(own, plan.size, numerics) for own in shared), default=0),
            )
            for rank, shared in enumerate(map(_shared, ranks))
        ]
        for work, ranks in zip(works, _homed(plan), strict=True)
    ]


def of_momentum(elements: int, numerics: Numerics) -> int:
    """Bytes in which the input of Newton-Schulz is made, before it is rounded to what travels.

    Args:
        elements: that this rank sends or keeps as a home.
        numerics: of the run.
    """
    if not (_works_on_lists(numerics) and numerics.config.nesterov):
        return 0
    return _FP32 * min(elements, ELEMENTS_AT_ONCE)


def of_update(elements: int, numerics: Numerics) -> int:
    """Bytes of directions in fp32; a list's copies are there until the next list's are made.

    Args:
        elements: that this rank holds.
        numerics: of the run.
    """
    if not _works_on_lists(numerics) or numerics.travels == "fp32":
        return 0
    return _FP32 * min(elements, 2 * ELEMENTS_AT_ONCE)


def _works_on_lists(numerics: Numerics) -> bool:
    """As ``runtime.fused.elementwise_on``; a GPU's machine is taken to have triton."""
    return not numerics.on_gpu or numerics.config.elementwise == "foreach"


def _homed(plan: ExchangePlan) -> Iterator[list[list[Matrix]]]:
    """For each round, by rank, the matrices that it orthogonalizes."""
    of_parameter = []
    matrices = iter(plan.matrices)
    for parameter in plan.parameters:
        of_parameter.append([next(matrices) for _ in parameter.matrices])
    for members in plan.rounds:
        by_rank: list[list[Matrix]] = [[] for _ in range(plan.size)]
        for matrix in (matrix for index in members for matrix in of_parameter[index]):
            by_rank[matrix.home].append(matrix)
        yield by_rank


def _shared(matrices: Iterable[Matrix]) -> list[list[Matrix]]:
    """The strips among a home's matrices, by the matrix that they are of: those of one are a run
    of numbers."""
    groups: list[list[Matrix]] = []
    after: tuple[int, ...] = ()
    for matrix in matrices:
        strip = matrix.strip
        if strip is None:
            continue
        if (*matrix.whole, strip.count, strip.number) != after:
            groups.append([])
        groups[-1].append(matrix)
        after = (*matrix.whole, strip.count, strip.number + 1)
    return groups


def _turning(own: Sequence[Matrix], itemsize: int) -> tuple[int, int, int]:
    """Bytes while strips are turned, of the turned ones, and while they are turned back."""
    strip = own[0].strip
    assert strip is not None
    rows, cols = sum(matrix.rows for matrix in own), sum(matrix.long for matrix in own)
    come, turned = itemsize * rows * strip.cols, itemsize * strip.rows * cols
    stays = itemsize * rows * cols
    flat = come if own[0].column_parts > 1 else 0  # their columns in order
    there = flat + turned - stays + max(come - stays, turned)
    return there, turned, turned + come - stays + max(turned - stays, come)


# --- Strips, on a GPU or a CPU -----------------------------------------------------------------


def of_strips(own: Sequence[Matrix], size: int, numerics: Numerics) -> int:
    """Bytes for the strips of one matrix that are here: turned, entered and iterated on.

    Args:
        own: the strips, in order; a home has neighbouring ones.
        size: number of ranks of the stage.
        numerics: of the run.
    """
    highest = max(_entering_strips(own, numerics), _iterating(own, size, numerics))
    if not own[0].is_turned:
        return highest
    there, turned, back = _turning(own, numerics.itemsize)
    return max(there, turned + highest, back)


def _entering_strips(own: Sequence[Matrix], numerics: Numerics) -> int:
    """Bytes of copies in fp32, which are divided in place, and of what they are rounded to."""
    dtype, kind = numerics.dtype, numerics.held
    short, longs = min(own[0].whole), [matrix.long for matrix in own]
    if dtype == "fp32":  # the copies are the iterates
        return _FP32 * short * sum(longs)
    entering = (_FP32 + _BYTES[kind]) * short * sum(longs)
    if kind != dtype:  # one strip at a time has a rounded copy, too
        entering += _BYTES[dtype] * short * max(longs)
    return entering


def _iterating(own: Sequence[Matrix], size: int, numerics: Numerics) -> int:
    """Bytes of iterates, and of squares: they are added over the homes, then multiplied."""
    strip, dtype, kind = own[0].strip, numerics.dtype, numerics.held
    assert strip is not None
    held, short = _BYTES[kind], min(own[0].whole)
    rounded = _BYTES[dtype] if kind != dtype else 0  # a product's rounded copy
    iterate = held * short * sum(matrix.long for matrix in own)
    made = (held + rounded) * short * max(matrix.long for matrix in own)  # one strip's next iterate
    square = held * short * short
    if makes_rows(*own[0].whole, strip.count, numerics):
        multiplying = _making_rows(own, held, numerics)
    elif strips_take_gram(*own[0].whole, strip.count, numerics):
        multiplying = 4 * square
    else:
        at_once = 1 + any(c != 0 for _, _, c in numerics.steps)
        multiplying = at_once * square + rounded * short * short
    return iterate + max(_adding(own, size, held, numerics), multiplying, made + square)


def _adding(own: Sequence[Matrix], size: int, held: int, numerics: Numerics) -> int:
    """Bytes while squares are added: those of the strips here, and this home's rows of all others.

    First the rows of squares that leave are beside them. Later it is this home's rows of the sum
    in fp32, a rounded copy of these rows, and the whole sum if other homes make rows of it.
    """
    strip = own[0].strip
    assert strip is not None
    short, homes = min(own[0].whole), min(size, strip.count)
    square, numbers = held * short * short, short * -(-short // homes)
    part, in_fp32 = held * numbers, _FP32 * numbers
    leaving = len(own) * (square - part)
    rounded = part if held < _FP32 else 0  # a sum in fp32 is not copied
    whole = square if homes > 1 else 0
    # To add 16 bits to fp32, torch copies them to fp32 on a CPU; a GPU's kernel converts them.
    widened = in_fp32 if held < _FP32 and not numerics.on_gpu else 0
    summing = in_fp32 + max(widened, rounded + whole)
    return len(own) * square + (strip.count - len(own)) * part + max(leaving, summing)


def _making_rows(own: Sequence[Matrix], held: int, numerics: Numerics) -> int:
    """Bytes of R and P, and of this home's rows of R, P and Q, in the highest of Gram's steps.

    Putting rows together takes no more than the products before and after it.
    """
    first, last = own[0].strip, own[-1].strip
    assert first is not None and last is not None
    short = min(own[0].whole)
    start, _ = square_rows(short, first.number, first.count)
    _, stop = square_rows(short, last.number, first.count)
    rows, square = held * short * (stop - start), held * short * short
    most = 0
    for part in numerics.segments:
        for step, (_, _, c) in enumerate(part):
            makes_power = c != 0  # else P is R
            # While Q is multiplied: its next rows, and P's. After the first step Q's and R's rows
            # have memory of their own, too.
            copies = 1 + makes_power + 2 * (step > 0)
            if step < len(part) - 1:  # then R is: Q's rows, and R's old and new ones
                copies = max(copies, 3)
            most = max(most, (1 + makes_power) * square + copies * rows)
    return most


# --- GPU ---------------------------------------------------------------------------------------


def _of_batches(work: RoundWork, rank: int, numerics: Numerics, limit: int) -> int:
    """Elements of scratch memory of the largest batch."""
    most = 0
    for layout, count in work.layouts[rank].items():
        rows, cols, *_ = layout
        if layout.shared is not None:
            continue
        for together, _ in batches(
            rows, cols, count, ns_batch=numerics.config.ns_batch, scratch=limit
        ):
            tight = together == 1 and is_tight(rows * cols, work.staged(rank))
            of_one = _of_one(rows, cols, numerics, tight=tight)
            most = max(most, together * of_one)
    return most


def _of_one(rows: int, cols: int, numerics: Numerics, *, tight: bool) -> int:
    """The next iterate and squares: two, or those of Gram's four that do not fit into a spare one.

    ``scratch_elements`` is the most that either iteration takes. Only where memory is ``tight`` all
    may be in the spare one.
    """
    square = min(rows, cols) ** 2
    squares = 2
    if takes_gram(rows, cols, numerics):
        outside = squares_outside(rows, cols)
        squares = outside if tight else max(1, outside)
    return rows * cols + squares * square


# --- CPU ---------------------------------------------------------------------------------------


def _most_on_cpu(matrices: Sequence[Matrix], size: int, numerics: Numerics) -> int:
    """Bytes; the strips of a matrix that are here are taken together."""
    whole = [matrix for matrix in matrices if matrix.strip is None]
    most = max((of_matrix_on_cpu(matrix, numerics) for matrix in whole), default=0)
    strips = [of_strips(own, size, numerics) for own in _shared(matrices)]
    return max(most, *strips, 0)


def of_matrix_on_cpu(matrix: Matrix, numerics: Numerics) -> int:
    """Bytes beside a matrix: while it is entered, or in a step of its iteration.

    Its own memory is one of two places for iterates only if they are as wide as what travels, and
    it is not one of several that lie in each other.
    """
    rows, cols = matrix.unit
    elements, square = rows * cols, min(rows, cols) ** 2
    dtype, kind = numerics.dtype, numerics.held
    held = _BYTES[kind]
    rounded = _BYTES[dtype] if kind != dtype else 0  # a product's rounded copy
    has_spare = held == numerics.itemsize and matrix.units == 1
    is_gram = takes_gram(rows, cols, numerics)
    products = len(numerics.segments) if is_gram else len(numerics.steps)
    # Without spare memory the first iterate stays, beside the last one and the one that is made.
    iterates = held * elements * (1 if has_spare else min(products, 2))
    made = 0 if has_spare else held * elements
    if is_gram:
        wide = min(rows, cols), max(rows, cols)  # as a CPU multiplies them
        squares = squares_outside(*wide) if has_spare else 4
        return max(
            _entering(elements, numerics),
            iterates + made + squares * held * square + rounded * elements,
        )
    at_once = 1 + any(c != 0 for _, _, c in numerics.steps)
    return max(
        _entering(elements, numerics),
        iterates + at_once * held * square + rounded * square,
        iterates + made + held * square + rounded * elements,
    )


def _entering(elements: int, numerics: Numerics) -> int:
    """Bytes of the first iterate, of the normalised matrix in fp32, scaled and then rounded."""
    dtype, kind = numerics.dtype, numerics.held
    of_one = _BYTES[kind] + _FP32
    if dtype == "fp16":
        of_one += _FP32
    if dtype != "fp32":
        of_one += _BYTES[dtype]
    if kind != dtype:
        of_one += _BYTES[kind]
    return elements * of_one
