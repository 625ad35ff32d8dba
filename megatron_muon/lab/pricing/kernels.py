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
    ns_flops,
    scratch_elements,
    squares_outside,
    takes_gram,
)
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.settings.coefficients import NsDtype

_FP32 = 4  # bytes
# Rows, columns and share of ``gemm_efficiency`` of the tiles that a product may take.
# They are an assumption: tiles of cuBLAS on Hopper, smaller ones slower.
TILES = ((128, 256, 1.0), (128, 128, 0.88), (64, 128, 0.70), (64, 64, 0.5))
# Most elements and tensors of a kernel of a ``torch._foreach`` operation of three
# lists; torch's MultiTensorApply.cuh: 320 blocks of 65,536 elements.
_FOREACH_ELEMENTS, _FOREACH_TENSORS = 320 * 65536, 48
# Kernels that divide a batch by its norms, and reads and writes of an element.
_NORMALISING, _PASSES = 11, 6


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds on the compute stream, operations that the host launches for them, and
    its seconds beside those.
    """

    seconds: float = 0.0
    launches: int = 0
    host: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.launches + other.launches,
            self.host + other.host,
        )

    def times(self, count: int) -> Cost:
        """The cost of doing this ``count`` times, one after another."""
        return Cost(self.seconds * count, self.launches * count, self.host * count)


def is_fused(numerics: Numerics) -> bool:
    """Whether momentum and update are the fused kernels, as if triton were
    installed.
    """
    return numerics.on_gpu and numerics.config.elementwise == "auto"


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

    A kernel of the device, if any, makes the symmetric products that it takes.
    On a CPU the time is that of the flops at the device's rate, one matrix at a time.
    """
    cost = _normalisation(hardware, batch * rows * cols, numerics)
    if not numerics.on_gpu:
        rate = hardware.product_rate("bf16")
        flops = ns_flops(rows, cols, numerics)
        return cost + Cost(batch * flops / rate, batch * 3 * len(numerics.steps))
    work = Products(hardware, min(rows, cols), max(rows, cols), batch, numerics)
    if takes_gram(rows, cols, numerics):
        in_two = batch == 1 and squares_outside(rows, cols) == 0
        for part in numerics.segments:
            cost += work.gram_segment([c != 0 for _, _, c in part], in_two=in_two)
        return cost
    return cost + work.standard_steps()


def sliced_steps(
    hardware: Hardware, square: int, long: int, numerics: Numerics
) -> Cost:
    """The cost of the standard iteration on a slice ``(square, long)``, without what
    sums squares.

    ``long`` may be the smaller one.
    """
    return Products(hardware, square, long, 1, numerics).standard_steps()


def _normalisation(hardware: Hardware, elements: int, numerics: Numerics) -> Cost:
    """The largest entry, division by a power of two, norm and division; in fp16 the
    norm is divided by its scale.
    """
    nbytes = numerics.itemsize * elements
    is_scaled = numerics.dtype == "fp16"
    return stream(hardware, _PASSES * nbytes, _NORMALISING + int(is_scaled))


@dataclass(frozen=True, slots=True)
class Products:
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
        cost = self.symmetric(long, linear=False)
        if squares:
            cost += self.symmetric(short, linear=True)
        # the linear term's factor is added to the square's diagonal
        if self.numerics.folded:
            return cost + stream(self.hardware, 0) + self.product(short, long, short)
        return cost + self.copy(short * long) + self.product(short, long, short)

    def gram_segment(self, squares: list[bool], *, in_two: bool = False) -> Cost:
        """XXᵀ, polynomials of it, QX.

        Args:
            squares: for each step, whether c is not 0.
            in_two: the last rows of QX are made apart, and copied over Q.
        """
        short, long = self.short, self.long
        cost = self.symmetric(long, linear=False)
        if in_two:
            cost += self.product(short, long - short, short) + self.product(
                short, short, short
            )
            cost += self.copy(short * short)
        else:
            cost += self.product(short, long, short)
        plus = self.symmetric(short, linear=True)
        if self.numerics.folded and all(squares):
            # linear terms are on the diagonal of H, which is the first Q
            diagonals = stream(self.hardware, 0).times(len(squares))
            others = 3 * (len(squares) - 1)
            alone = self.symmetric(short, linear=False)
            return cost + diagonals + plus.times(len(squares)) + alone.times(others)
        # Q = a + Z at first: a multiplication, and a is added to the diagonal. After it
        # each step makes Q + ZQ, and but for the last one R + ZR and its product with Z
        cost += self.copy(short * short) + stream(self.hardware, 0)
        return cost + plus.times(sum(squares) + 3 * (len(squares) - 1))

    def symmetric(self, inner: int, *, linear: bool) -> Cost:
        """A product of ``(short, short)``; a library's kernel adds the linear term by
        itself.
        """
        made = self.square(self.short, inner)
        if linear and not self._takes_kernel(self.short, inner):
            made += self.copy(self.short * self.short)
        return made

    def square(self, rows: int, inner: int) -> Cost:
        """A symmetric ``(rows, inner) @ (inner, rows)``."""
        plain = self.product(rows, rows, inner)
        if not self._takes_kernel(rows, inner):
            return plain
        least = self.hardware.kernel_us * MICRO
        ratio = self.hardware.symmetric_ratio
        return Cost(least + (plain.seconds - least) * ratio, 1)

    def _takes_kernel(self, rows: int, inner: int) -> bool:
        return fits_kernel(rows, inner, self.numerics.products)

    def product(self, rows: int, cols: int, inner: int) -> Cost:
        return product(
            self.hardware, rows, cols, inner, self.batch, self.numerics.dtype
        )

    def copy(self, elements: int) -> Cost:
        """The cost of a copy, as of a linear term, over which ``addmm`` writes its
        result.
        """
        return stream(self.hardware, 2 * self.numerics.itemsize * self.batch * elements)
