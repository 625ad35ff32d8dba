"""The cost, on a GPU, of rules that add up numbers over whole matrices, beside Muon's
step.

Launches are those of torch's operations as a virtual GPU counts them; bytes are what
they read and write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_muon.lab.pricing.hardware import MICRO, Hardware
from megatron_muon.lab.pricing.kernels import Cost, stream
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.rounds.cut import ELEMENTS_AT_ONCE

_FP32 = 4


class _Passes(NamedTuple):
    """What one rule has beside Muon's step."""

    before: int  # before, after: bytes an element before the gather, after the scatter
    after: int
    launches: int  # for the numbers of all slices of a round together


_OF_RULE = {
    # after: the direction to fp32, a norm of both, their product, its sum
    "hyperball": _Passes(0, 28, 70),
    # before: a norm of momentum and gradient, the gradient's largest element, their
    # product, its sum
    "namo": _Passes(28, 0, 100),
}
_OF_SLICE = 1  # launches, for its numbers
_BLENDS = 4  # more of them without the fused kernels


def asks(numerics: Numerics) -> bool:
    """Whether a run's rule asks for sums; each rank then has a message a round."""
    return numerics.config.rule in _OF_RULE


def before_gather(
    hardware: Hardware, slices: Sequence[int], size: int, numerics: Numerics
) -> Cost:
    """The cost before a round is gathered.

    Args:
        hardware: of the rank.
        slices: elements of each slice of the rank in the round.
        size: number of ranks of the stage.
        numerics: of the round's matrices.
    """
    passes = _OF_RULE.get(numerics.config.rule)
    if passes is None or not passes.before or not slices:
        return Cost()
    cost = stream(hardware, sum(slices) * passes.before, passes.launches)
    return cost + _numbers(hardware, slices, size, numerics)


def after_scatter(
    hardware: Hardware, slices: Sequence[int], size: int, numerics: Numerics
) -> Cost:
    """The cost after a round is scattered; see ``before_gather``."""
    passes = _OF_RULE.get(numerics.config.rule)
    if passes is None or not passes.after or not slices:
        return Cost()
    cost = stream(hardware, sum(slices) * passes.after, passes.launches)
    return cost + _numbers(hardware, slices, size, numerics)


def _numbers(
    hardware: Hardware, slices: Sequence[int], size: int, numerics: Numerics
) -> Cost:
    """Launches of each slice, and the sum over the stage: a message up and one down a
    tree of the ranks, of few bytes.
    """
    fused = numerics.on_gpu and numerics.config.elementwise == "auto"
    of_slice = _OF_SLICE if fused else _OF_SLICE + _BLENDS
    seconds = 2 * size.bit_length() * hardware.message_us * MICRO
    return Cost(seconds) + stream(hardware, 0, of_slice * len(slices))


def scratch_before(slices: Sequence[int], numerics: Numerics) -> int:
    """Bytes before anything of a round is staged: products of fp32 gradients."""
    if numerics.config.rule != "namo":
        return 0
    return _FP32 * min(sum(slices), ELEMENTS_AT_ONCE)


def scratch_after(slices: Sequence[int], numerics: Numerics) -> int | None:
    """Bytes while a round's shards are updated; None where they are Muon's."""
    if numerics.config.rule != "hyperball":
        return None
    # directions in fp32, and products
    return 2 * _FP32 * min(sum(slices), ELEMENTS_AT_ONCE)
