"""What a strip costs its home beside its flops and its own slices, as plain integers.

Homes of a matrix add squares, put rows of them together, and exchange rows of the
matrix for columns. All of it takes messages, which every home waits for, and passes
over memory. ``pricing.strips`` has the same with floats, for any hardware;
``test_pricing_counts`` holds the two together. Here bytes count by ``link_gbytes``; all
else is an H100's.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from megatron_muon.orthogonalize.iteration import (
    halves,
    makes_rows,
    strips_take_gram,
    symmetric_flops,
)
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.homes import LINK_GBYTES
from megatron_muon.planning.layout import Strip
from megatron_muon.planning.sharing.halves import Operation, operations, run
from megatron_muon.settings.run import NODE

# Speed of large products over ``rank_tflops``, whose default is 40 % of a data sheet's.
# The time model of an H100 has 65 to 71 % for matrices that can gain by being shared.
# At 40 % a plan shares what does not pay: work seems longer than it is beside messages.
LARGE_PRODUCTS = Fraction(13, 8)
# Speeds by LINK_GBYTES, that of a link between nodes. An H100's link inside a node
# sends 450 GB/s each way and reaches 0.7 of it, its memory 3,350 and 0.8, its port 50
# and 0.85 (``presets``). A stated link changes neither.
NODE_LINK, MEMORY = 7, 63
# Latency of a grouped send and receive, and what each peer adds; the shortest kernel.
# The same.
MESSAGE_PS, PEER_PS, _KERNEL_PS = 25_000_000, 1_200_000, 2_500_000
# Of a strip: kernels, and bytes read or written per element (``pricing.strips``:
# largest entry, fp32 copy, division, norm, division and cast, copy back).
_STRIP_KERNELS, _STRIP_BYTES = 30, 38
# Of a sum of squares, in squares: sums in fp32, and a copy of the home's own rows.
_SUM_PASSES = 6
# Kernels of a sum of squares, beside one for each home.
_SUM_KERNELS = 3
# Kernels of an operation where homes make rows of squares. Their passes over linear
# terms and messages are in ``LARGE_PRODUCTS``, as those of whole matrices are.
_PRODUCT_KERNELS = 3
# Of a strip's rows and of its columns: into a message, out of it, and where they came
# from.
_EXCHANGE_PASSES = 2 * 5


class StripTime(NamedTuple):
    """Elements on the home's link between nodes that take as long, and picoseconds
    beside them.
    """

    elements: int = 0
    waits: int = 0


def faster_near(link_gbytes: float | None, size: int, neighbours: int) -> int:
    """How much faster than the stated link one inside a node is; 1 where a node has the
    stage.
    """
    return 1 if link_gbytes and size <= neighbours else _by_link(NODE_LINK, link_gbytes)


@lru_cache
def _by_link(ratio: int, link_gbytes: float | None) -> int:
    """What is ``ratio`` beside LINK_GBYTES, beside the stated link."""
    return max(
        1, int(ratio * Fraction(LINK_GBYTES) / Fraction(link_gbytes or LINK_GBYTES))
    )


def strip_time(
    strip: Strip | None, own: int, size: int, numerics: Numerics, neighbours: int = NODE
) -> StripTime:
    """The time of a strip at its home beside products, slices and results.

    Args:
        strip: the strip; None for a whole matrix, which takes none.
        own: its elements.
        size: number of ranks in the stage.
        numerics: of the run.
        neighbours: see ``RankGrid``.
    """
    if strip is None:
        return StripTime()
    homes = min(size, strip.count)
    link = numerics.config.link_gbytes
    # teams are neighbours: of one node where it holds whole teams
    speed = faster_near(link, size, neighbours) if neighbours % homes == 0 else 1
    kernels, messages = _STRIP_KERNELS, 2  # of numbers
    travels, passes = 0, _STRIP_BYTES * own // numerics.itemsize
    if strip.comes_as_rows:
        travels += 2 * own
        passes += _EXCHANGE_PASSES * own
        messages += 2
    waits = 0
    if makes_rows(strip.rows, strip.cols, strip.count, numerics):
        shape = strip.rows, strip.cols, strip.long.size, strip.count
        waits = _beside_products(*shape, homes, speed, numerics)
    else:
        square = min(strip.rows, strip.cols) ** 2
        takes_gram = strips_take_gram(strip.rows, strip.cols, strip.count, numerics)
        sums = len(numerics.segments if takes_gram else numerics.steps)
        travels += 2 * sums * square
        passes += _SUM_PASSES * sums * square
        messages += 2 * sums
        kernels += sums * (homes + _SUM_KERNELS)
    return StripTime(
        travels * (homes - 1) // (homes * speed) + passes // _by_link(MEMORY, link),
        messages * _message_ps(homes) + kernels * _KERNEL_PS + waits,
    )


def _message_ps(homes: int) -> int:
    return MESSAGE_PS + PEER_PS * (homes - 1)


@lru_cache(4096)
def _beside_products(
    whole_rows: int,
    whole_cols: int,
    long: int,
    count: int,
    homes: int,
    speed: int,
    numerics: Numerics,
) -> int:
    """Picoseconds in which a home that makes rows of squares multiplies nothing.

    Args:
        whole_rows, whole_cols, long, count: of the matrix and its strips.
        homes: that have a part of it.
        speed: of the link between them, beside the stated one.
        numerics: of the run.
    """
    short = min(whole_rows, whole_cols)
    rows = -(-short // count)
    kind, itemsize = numerics.products, numerics.itemsize
    # picoseconds of a flop, of an element on the link, and of one in memory
    flop = 1 / (LARGE_PRODUCTS * Fraction(numerics.config.rank_tflops))
    stated = Fraction(numerics.config.link_gbytes or LINK_GBYTES)
    element = 1000 * itemsize * Fraction(homes - 1, homes) / (stated * speed)
    memory = 1000 * itemsize / Fraction(MEMORY * LINK_GBYTES)
    widths = [stop - start for start, stop in halves(short)]

    def flops(one: Operation) -> int:
        width = widths[one.half]
        match one.kind:
            case "square":
                below = 0 if one.half else 2 * width * sum(widths[1:]) * long
                return below + symmetric_flops(width, long, kind)
            case "product":
                return 2 * rows * width * short
            case "apply":
                return 2 * short * width * long
        return 0

    def compute(one: Operation) -> Fraction:
        passes, kernels = 0, _PRODUCT_KERNELS
        if one.kind == "sum":
            passes = _SUM_PASSES * short * widths[one.half]
            kernels += homes
        return flop * flops(one) + memory * passes + kernels * _KERNEL_PS

    def travel(one: Operation) -> Fraction:
        return _message_ps(homes) + element * short * widths[one.half]

    beside = Fraction(0)
    for segment in operations(whole_rows, whole_cols, count, numerics):
        beside += run(segment, compute, travel, Fraction(0))
        beside -= flop * sum(map(flops, segment))
    return int(beside)
