"""What a strip costs its home beside its products and its own slices.

Homes of a matrix add squares, put rows of them together, and exchange rows of the
matrix for columns. All of it takes messages, which every home waits for, and passes
over memory. ``pricing.strips`` has the same with floats, for any hardware;
``test_pricing_counts`` holds the two together.
"""

from __future__ import annotations

from megatron_muon.orthogonalize.iteration import gathers_of_rows
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.layout import Strip
from megatron_muon.planning.sharing.speeds import (
    KERNEL,
    MEMORY_BYTE,
    MESSAGE,
    NETWORK_BYTE,
    NODE_BYTE,
    PEER,
)
from megatron_muon.settings.run import NODE

# Of a strip: kernels, and bytes read or written per element (``pricing.strips``:
# largest entry, fp32 copy, division, norm, division and cast, copy back).
_STRIP_KERNELS, _STRIP_BYTES = 30, 38
# Of a sum of squares, in squares: sums in fp32, and a copy of the home's own rows.
_SUM_PASSES = 6
# Kernels of a sum of squares, beside one for each home.
_SUM_KERNELS = 3
# Of a strip's rows and of its columns: into a message, out of it, and where they came
# from.
_EXCHANGE_PASSES = 2 * 5


def strip_time(
    strip: Strip | None, own: int, size: int, numerics: Numerics, neighbours: int = NODE
) -> int:
    """The time of a strip at its home beside products, slices and results, in flops.

    Args:
        strip: the strip; None for a whole matrix, which takes none.
        own: its elements.
        size: number of ranks in the stage.
        numerics: of the run.
        neighbours: see ``RankGrid``.
    """
    if strip is None:
        return 0
    homes = min(size, strip.count)
    # teams are neighbours: of one node where it holds whole teams
    byte = NODE_BYTE if neighbours % homes == 0 else NETWORK_BYTE
    square = min(strip.rows, strip.cols) ** 2
    gathers = gathers_of_rows(strip.rows, strip.cols, strip.count, numerics)
    sums = len(gathers)
    rows = sum(gathers)
    # two of numbers; squares are added, then put together, and so are rows of products
    messages = 2 + 2 * sums + rows
    travels = (2 * sums + rows) * square
    passes = _STRIP_BYTES * own // numerics.itemsize + _SUM_PASSES * sums * square
    if strip.comes_as_rows:
        travels += 2 * own
        passes += _EXCHANGE_PASSES * own
        messages += 2
    kernels = _STRIP_KERNELS + sums * (homes + _SUM_KERNELS)
    bytes_ = numerics.itemsize * (travels * (homes - 1) // homes)
    return (
        bytes_ * byte
        + numerics.itemsize * passes * MEMORY_BYTE
        + messages * (MESSAGE + PEER * (homes - 1))
        + kernels * KERNEL
    )
