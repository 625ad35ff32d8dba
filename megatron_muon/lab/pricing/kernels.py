"""The time of kernels: streams over memory, products, and a batch's Newton-Schulz.

Number and bytes of kernels are those that ``update``, ``newton_schulz`` and ``matmul``
launch on CUDA; the time of each follows from ``Hardware`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_muon.lab.pricing.hardware import MICRO, Hardware
from megatron_muon.orthogonalize.iteration import (
    fits_kernel,
    gathers_of_rows,
    ns_flops,
    scratch_elements,
    squares_outside,
    strips_take_gram,
    takes_gram,
)
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.settings.coefficients import NsDtype

_FP32 = 4  # bytes
# Rows, columns and share of ``gemm_efficiency`` of the tiles that a product may take.
# They are an assumption: tiles of cuBLAS on Hopper, smaller ones slower.
TILES = ((128, 256, 1.0), (128, 128, 0.88), (64, 128, 0.70), (64, 64, 0.5))
# quack's kernel takes matrices of more than one tile of 256 rows.
_SYMMETRIC_ROWS = 257
# Most elements and tensors of a kernel of a ``torch._foreach`` operation of three
# lists; torch's MultiTensorApply.cuh: 320 blocks of 65,536 elements.
_FOREACH_ELEMENTS, _FOREACH_TENSORS = 320 * 65536, 48
# Kernels that divide a batch by its norms, and reads and writes of an element: fused,
# and torch's.
_NORMALISING_FUSED, _FUSED_PASSES = 3, 3
_NORMALISING, _PASSES = 11, 6
# Kernels of a strip in 16 bits, and bytes per element: largest entry, fp32 copy, its
# division, its norm, division and cast, copy back. And per byte of a square: copies
# into and out of messages, and sums in fp32.
_STRIP = 24
_STRIP_BYTES = 2 + (2 + 4) + (4 + 4) + 4 + (4 + 4) + (4 + 2) + 4
_SUM_BYTES = 7.5
# Per byte of a strip's rows that are exchanged for columns: into a message, out of it,
# and for the rows, half of these bytes, once more; each is read and written.
_EXCHANGE_BYTES = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds on the compute stream, and operations that the host launches for them."""

    seconds: float = 0.0
    launches: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.launches + other.launches)

    def times(self, count: int) -> Cost:
        """The cost of doing this ``count`` times, one after another."""
        return Cost(self.seconds * count, self.launches * count)


def stream(hardware: Hardware, nbytes: float, launches: int = 1) -> Cost:
    """The cost of kernels that together read and write ``nbytes``."""
    seconds = nbytes / hardware.memory + launches * hardware.kernel_us * MICRO
    return Cost(seconds, launches)


def foreach(
    hardware: Hardware, elements: int, tensors: int, nbytes: float, operations: int = 1
) -> Cost:
    """The cost of ``torch._foreach`` operations, which read and write ``nbytes`` an
    element.
    """
    if elements == 0:
        return Cost()
    by_elements = -(-elements // _FOREACH_ELEMENTS)
    launches = operations * max(by_elements, -(-tensors // _FOREACH_TENSORS))
    return stream(hardware, elements * nbytes, launches)


@lru_cache(65536)
def product(
    hardware: Hardware,
    rows: int,
    cols: int,
    inner: int,
    batch: int = 1,
    dtype: NsDtype = "bf16",
) -> Cost:
    """The cost of a product ``(batch, rows, inner) @ (batch, inner, cols)``, one
    launch.

    It takes whole waves of the tiles that are fastest for it. Where they do not fill
    the device, it may be cut along its inner dim. Reading its operands and writing its
    result is a lower bound.
    """
    itemsize = _FP32 if dtype == "fp32" else 2
    rate = hardware.product_rate(dtype)
    flops = 2 * batch * rows * cols * inner
    best = math.inf
    for tile_rows, tile_cols, share in TILES:
        tiles = batch * -(-rows // tile_rows) * -(-cols // tile_cols)
        waves = -(-tiles // hardware.processors)
        of_wave = 2 * tile_rows * tile_cols * inner * hardware.processors
        best = min(best, waves * of_wave / (rate * share))
        if tiles < hardware.processors:
            split = flops / (rate * share * hardware.split_efficiency)
            best = min(best, split + hardware.split_us * MICRO)
    moved = itemsize * batch * (rows * inner + inner * cols + rows * cols)
    return Cost(max(best, moved / hardware.memory) + hardware.kernel_us * MICRO, 1)


def batches(
    rows: int, cols: int, count: int, *, ns_batch: int | None, scratch: int
) -> Iterator[tuple[int, int]]:
    """``(matrices, times)``: how ``count`` matrices at one home in one round are taken
    together.

    Args:
        ns_batch: most matrices in a batch; None: as many as have scratch memory.
        scratch: elements of scratch memory (``rounds.cut.scratch_limit``).
    """
    most = ns_batch or max(1, scratch // scratch_elements(rows, cols))
    if count // most:
        yield most, count // most
    if count % most:
        yield count % most, 1


@lru_cache(65536)
def newton_schulz(
    hardware: Hardware, rows: int, cols: int, batch: int, numerics: Numerics
) -> Cost:
    """The cost to orthogonalize a batch, from the gathered matrices to their
    directions.

    On ``cuda_symmetric`` a library's kernel makes the symmetric products that it takes.
    On a CPU the time is that of the flops at the device's rate, one matrix at a time.
    """
    cost = _normalisation(hardware, batch * rows * cols, numerics)
    if not numerics.on_gpu:
        rate = hardware.product_rate("bf16")
        flops = ns_flops(rows, cols, numerics)
        return cost + Cost(batch * flops / rate, batch * 3 * len(numerics.steps))
    work = _Products(hardware, min(rows, cols), max(rows, cols), batch, numerics)
    if takes_gram(rows, cols, numerics):
        in_two = batch == 1 and squares_outside(rows, cols) == 0
        for part in numerics.segments:
            cost += work.gram_segment([c != 0 for _, _, c in part], in_two=in_two)
        return cost
    return cost + work.standard_steps()


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
    sends their sum to them. Where they make rows of squares, these are put together.
    Nothing hides messages. ``whole`` is the matrix, ``long`` the strip's length,
    ``count`` the number of strips.
    """
    itemsize = numerics.itemsize
    short = min(whole)
    work = _Products(hardware, short, long, 1, numerics)
    add = _added(hardware, short * short * itemsize, homes)
    cost = stream(hardware, _STRIP_BYTES * short * long, _STRIP)
    cost += _numbers(hardware, homes).times(3)
    if strips_take_gram(*whole, count, numerics):
        gathers = gathers_of_rows(*whole, count, numerics)
        for part, rows in zip(numerics.segments, gathers, strict=True):
            squares = [c != 0 for _, _, c in part]
            cost += add + _together(hardware, short * short * itemsize, homes).times(
                rows
            )
            if rows:
                cost += work.gram_segment([]) + work.rows_of_squares(
                    squares, -(-short // count)
                )
            else:
                cost += work.gram_segment(squares)
        return cost
    return cost + add.times(len(numerics.steps)) + work.standard_steps()


def sliced_steps(
    hardware: Hardware, square: int, long: int, numerics: Numerics
) -> Cost:
    """The cost of the standard iteration on a slice ``(square, long)``, without what
    sums squares.

    ``long`` may be the smaller one.
    """
    return _Products(hardware, square, long, 1, numerics).standard_steps()


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
    return _message(hardware, homes).times(2) + Cost(travels, 2) + copies


def _added(hardware: Hardware, nbytes: int, homes: int) -> Cost:
    """A square of ``nbytes`` that is added over its homes."""
    travels = 2 * nbytes * (homes - 1) / homes / _link(hardware, homes)
    sums = stream(hardware, _SUM_BYTES * nbytes, homes + 4)
    return _message(hardware, homes).times(2) + Cost(travels, 2) + sums


def _together(hardware: Hardware, nbytes: int, homes: int) -> Cost:
    """A square of ``nbytes`` that is put together from each home's rows, received in
    place.
    """
    travels = nbytes * (homes - 1) / homes / _link(hardware, homes)
    own = stream(hardware, 2 * nbytes / homes)
    return _message(hardware, homes) + Cost(travels, 1) + own


def _numbers(hardware: Hardware, homes: int) -> Cost:
    """A message of a few numbers from each home to each other one."""
    return _message(hardware, homes) + Cost(0.0, 3)


def _message(hardware: Hardware, homes: int) -> Cost:
    """What a message from each home to each other one takes, without its bytes and
    launches.
    """
    return Cost((hardware.message_us + hardware.peer_us * (homes - 1)) * MICRO, 0)


def _link(hardware: Hardware, homes: int) -> float:
    """Bytes a second between homes: they are neighbours, of one node where it holds
    whole teams.
    """
    near = hardware.gpus_per_node % homes == 0
    return hardware.node_link if near else hardware.network_link


def _normalisation(hardware: Hardware, elements: int, numerics: Numerics) -> Cost:
    """Norm and division by triton's kernels, as if it were installed on every GPU.

    Torch's operations also look for the largest entry and divide by a power of two, and
    in fp16 divide the norm by its scale.
    """
    nbytes = numerics.itemsize * elements
    if numerics.on_gpu and numerics.config.elementwise == "auto":
        return stream(hardware, _FUSED_PASSES * nbytes, _NORMALISING_FUSED)
    is_scaled = numerics.dtype == "fp16"
    return stream(hardware, _PASSES * nbytes, _NORMALISING + int(is_scaled))


@dataclass(frozen=True, slots=True)
class _Products:
    """Products of a batch of ``(short, long)`` matrices; of a strip ``long`` is a
    rank's part.
    """

    hardware: Hardware
    short: int
    long: int
    batch: int
    numerics: Numerics

    def standard_steps(self) -> Cost:
        """All steps: those whose c is not 0 have a square more."""
        squared = sum(c != 0 for _, _, c in self.numerics.steps)
        cost = self._standard_step(squares=True).times(squared)
        return cost + self._standard_step(squares=False).times(
            len(self.numerics.steps) - squared
        )

    def _standard_step(self, *, squares: bool) -> Cost:
        """XXᵀ, bA + cA² unless c is 0, aX + BX."""
        short, long = self.short, self.long
        cost = self._symmetric(long, linear=False)
        if squares:
            cost += self._symmetric(short, linear=True)
        # the linear term's factor is added to the square's diagonal
        if self.numerics.folded:
            return cost + stream(self.hardware, 0) + self._product(short, long, short)
        return cost + self._copy(short * long) + self._product(short, long, short)

    def gram_segment(self, squares: list[bool], *, in_two: bool = False) -> Cost:
        """XXᵀ, polynomials of it, QX.

        Args:
            squares: for each step, whether c is not 0.
            in_two: the last rows of QX are made apart, and copied over Q.
        """
        short, long = self.short, self.long
        cost = self._symmetric(long, linear=False)
        if in_two:
            cost += self._product(short, long - short, short) + self._product(
                short, short, short
            )
            cost += self._copy(short * short)
        else:
            cost += self._product(short, long, short)
        if not squares:
            return cost
        plus = self._symmetric(short, linear=True)
        if self.numerics.folded and all(squares):
            # linear terms are on the diagonal of H, which is the first Q
            diagonals = stream(self.hardware, 0).times(len(squares))
            others = 3 * (len(squares) - 1)
            alone = self._symmetric(short, linear=False)
            return cost + diagonals + plus.times(len(squares)) + alone.times(others)
        # Q = a + Z at first: a multiplication, and a is added to the diagonal. After it
        # each step makes Q + ZQ, and but for the last one R + ZR and its product with Z
        cost += self._copy(short * short) + stream(self.hardware, 0)
        return cost + plus.times(sum(squares) + 3 * (len(squares) - 1))

    def rows_of_squares(self, squares: list[bool], rows: int) -> Cost:
        """``gram_segment``'s polynomials, of which ``rows`` rows are made here."""
        products = sum(squares) + 3 * (len(squares) - 1)
        copy = self._copy(rows * self.short)
        one = self._product(rows, self.short, self.short) + copy
        return copy + stream(self.hardware, 0) + one.times(products)

    def _symmetric(self, inner: int, *, linear: bool) -> Cost:
        """A product of ``(short, short)``; a library's kernel adds the linear term by
        itself.
        """
        plain = self._product(self.short, self.short, inner)
        if self._takes_kernel(inner):
            least = self.hardware.kernel_us * MICRO
            ratio = self.hardware.symmetric_ratio
            return Cost(least + (plain.seconds - least) * ratio, 1)
        return plain + self._copy(self.short * self.short) if linear else plain

    def _takes_kernel(self, inner: int) -> bool:
        has = (
            self.numerics.device == "cuda_symmetric" and self.numerics.itemsize < _FP32
        )
        return has and self.short >= _SYMMETRIC_ROWS and fits_kernel(self.short, inner)

    def _product(self, rows: int, cols: int, inner: int) -> Cost:
        return product(
            self.hardware, rows, cols, inner, self.batch, self.numerics.dtype
        )

    def _copy(self, elements: int) -> Cost:
        """The cost of the linear term's copy, over which ``addmm`` writes its
        result.
        """
        return stream(self.hardware, 2 * self.numerics.itemsize * self.batch * elements)
