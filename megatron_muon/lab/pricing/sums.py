"""The cost, on a GPU, of rules that add up numbers over whole matrices, beside Muon's
step.

Launches are those of torch's operations as a virtual GPU counts them; bytes are what
they read and write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatron_muon.lab.pricing.hardware import MICRO, Hardware
from megatron_muon.lab.pricing.kernels import Cost, is_fused, stream
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.rounds.cut import ELEMENTS_AT_ONCE

_FP32 = 4
Point = Literal["gather", "scatter"]


class _Sums(NamedTuple):
    """What one rule has beside Muon's step."""

    point: Point  # before the gather, or after the scatter
    nbytes: int  # of an element, that are read and written
    launches: int  # for the numbers of all slices of a round together
    scratch: int  # bytes of an element, while it adds up


_OF_RULE = {
    # the direction to fp32, a norm of both, their product, its sum
    "hyperball": _Sums("scatter", 28, 70, 2 * _FP32),
    # a norm of momentum and gradient, the gradient's largest element, their product,
    # its sum
    "namo": _Sums("gather", 28, 100, _FP32),
}
_OF_SLICE = 1  # launches, for its numbers
_BLENDS = 4  # more of them without the fused kernels


def asks(numerics: Numerics) -> bool:
    """Whether a run's rule asks for sums; each rank then has a message a round."""
    return numerics.config.rule in _OF_RULE


def cost(
    point: Point,
    hardware: Hardware,
    slices: Sequence[int],
    size: int,
    numerics: Numerics,
) -> Cost:
    """The cost of what a rule adds up before a round is gathered, or after it is
    scattered: launches of each slice, and the sum over the stage, a message up and one
    down a tree of the ranks, of few bytes.

    Args:
        point: which of both.
        hardware: of the rank.
        slices: elements of each slice of the rank in the round.
        size: number of ranks of the stage.
        numerics: of the round's matrices.
    """
    added = _OF_RULE.get(numerics.config.rule)
    if added is None or added.point != point or not slices:
        return Cost()
    passes = stream(hardware, sum(slices) * added.nbytes, added.launches)
    of_slice = _OF_SLICE if is_fused(numerics) else _OF_SLICE + _BLENDS
    seconds = 2 * size.bit_length() * hardware.message_us * MICRO
    return passes + Cost(seconds) + stream(hardware, 0, of_slice * len(slices))


def scratch(point: Point, slices: Sequence[int], numerics: Numerics) -> int:
    """Bytes for products while a rule adds up at a point; 0 where it does not."""
    added = _OF_RULE.get(numerics.config.rule)
    if added is None or added.point != point:
        return 0
    return added.scratch * min(sum(slices), ELEMENTS_AT_ONCE)
