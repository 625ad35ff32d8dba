"""What a strip costs its home beside its flops and its own slices, as plain integers.

Homes of a matrix add squares, put rows of them together, and exchange rows of the
matrix for columns. All of it takes messages, which every home waits for, and passes
over memory. ``pricing.kernels`` has the same with floats, for any hardware;
``test_pricing_counts`` holds the two together. Here bytes count by ``link_gbytes``; all
else is an H100's.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from megatron_muon.orthogonalize.iteration import gathers_of_rows
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.homes import LINK_GBYTES
from megatron_muon.planning.layout import Strip
from megatron_muon.settings.run import NODE

# Speeds by LINK_GBYTES, that of a link between nodes. An H100's link inside a node
# sends 450 GB/s each way and reaches 0.7 of it, its memory 3,350 and 0.8, its port 50
# and 0.85 (``presets``). A stated link changes neither.
NODE_LINK, MEMORY = 7, 63
# Latency of a grouped send and receive, and what each peer adds; the shortest kernel.
# The same.
MESSAGE_PS, PEER_PS, _KERNEL_PS = 25_000_000, 1_200_000, 2_500_000
# Of a strip: kernels, and bytes read or written per element (``pricing.kernels``:
# largest entry, fp32 copy, division, norm, division and cast, copy back).
_STRIP_KERNELS, _STRIP_BYTES = 24, 38
# Of a sum of squares, in halves of the square: copies into and out of messages, sums in
# fp32.
_SUM_HALVES = 15
# Of one's own rows, each time that rows are put together: a copy of them, and the
# linear terms of the 14 products for 10 such times in five steps.
_ROW_PASSES = 5
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
    square = min(strip.rows, strip.cols) ** 2
    gathers = gathers_of_rows(strip.rows, strip.cols, strip.count, numerics)
    sums = len(gathers)
    rows = sum(gathers)
    travels = (2 * sums + rows) * square
    passes = _STRIP_BYTES * own // numerics.itemsize
    passes += _SUM_HALVES * sums * square // 2 + _ROW_PASSES * rows * square // homes
    messages = 3 + 2 * sums + rows  # three of numbers
    if strip.comes_as_rows:
        travels += 2 * own
        passes += _EXCHANGE_PASSES * own
        messages += 2
    link = numerics.config.link_gbytes
    # teams are neighbours: of one node where it holds whole teams
    speed = faster_near(link, size, neighbours) if neighbours % homes == 0 else 1
    kernels = _STRIP_KERNELS + sums * (homes + 4) + rows
    return StripTime(
        travels * (homes - 1) // (homes * speed) + passes // _by_link(MEMORY, link),
        messages * (MESSAGE_PS + PEER_PS * (homes - 1)) + kernels * _KERNEL_PS,
    )
