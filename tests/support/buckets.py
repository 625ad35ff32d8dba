"""Muon's parameters in the buckets that Megatron fills."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_muon.planning.buckets import Bucket
from megatron_muon.planning.layout import Parameter, Span


def placed(
    muons: Sequence[Parameter | None], buckets: Iterable[Bucket]
) -> list[Parameter]:
    """Muon's parameters in their places, in the order of the model.

    Args:
        muons: of each weight of a grad buffer, in that order; None for AdamW's.
        buckets: those of the buffer, which reverse the order.
    """
    parameters, first = [], 0
    waiting = iter(muons[::-1])
    for bucket in buckets:
        whole = Span(first, first + bucket.numel)
        for start, weight in bucket.weights:
            muon = next(waiting)
            if muon is not None:
                span = Span(first + start, first + start + weight.numel)
                parameters.append(replace(muon, bucket=whole, span=span))
        first = whole.stop
    return parameters[::-1]
