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
from megatron_muon.settings.rules import ADAPTIVE

_FP32 = 4
_OF_ROUND = 70  # launches, for the numbers of all slices together


class _Sums(NamedTuple):
    """What one rule has beside Muon's step."""

    before: int  # before, after: bytes an element before the gather, after the scatter
    after: int
    launches: int  # of a slice
    blends: int  # more of them without the fused kernels


_OF_RULE = {
    # after: the direction to fp32, a norm of both, their product, its sum
    "hyperball": _Sums(0, 28, 1, 4),
    # before: signs, and what is not finite stays; after: the square, a moment, root and
    # quotient, twice, once for the sums and once for the update
    "adamuon": _Sums(14, 138, 19, 0),
    # before: a norm of momentum and gradient, their product, its sum
    "namo": _Sums(24, 0, 1, 4),
    # without signs; as namo
    "adaptive_adamuon": _Sums(0, 138, 19, 0),
    "adaptive_namo": _Sums(24, 0, 1, 4),
}


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
    sums = _OF_RULE.get(numerics.config.rule)
    if sums is None or not slices:
        return Cost()
    cost = stream(hardware, sum(slices) * sums.before, 0)
    if sums.after:  # then its numbers are added up later
        return cost
    return cost + _numbers(sums, hardware, slices, size, numerics)


def after_scatter(
    hardware: Hardware, slices: Sequence[int], size: int, numerics: Numerics
) -> Cost:
    """The cost after a round is scattered; see ``before_gather``."""
    sums = _OF_RULE.get(numerics.config.rule)
    if sums is None or not sums.after or not slices:
        return Cost()
    cost = stream(hardware, sum(slices) * sums.after, 0)
    return cost + _numbers(sums, hardware, slices, size, numerics)


def _numbers(
    sums: _Sums,
    hardware: Hardware,
    slices: Sequence[int],
    size: int,
    numerics: Numerics,
) -> Cost:
    """Launches, and the sum over the stage: a message up and one down a tree of the
    ranks, of few bytes.
    """
    fused = numerics.on_gpu and numerics.config.elementwise == "auto"
    of_slice = sums.launches if fused else sums.launches + sums.blends
    seconds = 2 * size.bit_length() * hardware.message_us * MICRO
    return Cost(seconds) + stream(hardware, 0, of_slice * len(slices) + _OF_ROUND)


def scratch_before(slices: Sequence[int], numerics: Numerics) -> int:
    """Bytes before anything of a round is staged: products of fp32 gradients."""
    if numerics.config.rule.removeprefix(ADAPTIVE) != "namo":
        return 0
    return _FP32 * min(sum(slices), ELEMENTS_AT_ONCE)


def scratch_after(slices: Sequence[int], numerics: Numerics) -> int | None:
    """Bytes while a round's shards are updated; None where they are Muon's."""
    match numerics.config.rule.removeprefix(ADAPTIVE):
        case "hyperball":  # directions in fp32, and products
            return 2 * _FP32 * min(sum(slices), ELEMENTS_AT_ONCE)
        case "adamuon":  # all directions in fp32; of a slice its moment and its square
            wide = 0 if numerics.travels == "fp32" else _FP32 * sum(slices)
            return wide + 2 * _FP32 * max(slices, default=0)
    return None
