"""How many buckets of gradients cost least where Megatron overlaps their reduction with backward.

A step may have to wait for two things. One is the last bucket: nothing is left to hide the
reduction of its gradients, and the next forward pass needs its parameters first. The other is
Muon's exchange: each of a bucket's ``dp_size - 1`` shard edges cuts a parameter. Many buckets make
the first small, few the second. Both go over the same links, so bytes are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from megatron_muon.config import MuonConfig
from megatron_muon.planning.bucket_order import (
    ALIGNMENT,
    Bucket,
    Holders,
    away,
    orders,
    sent_bytes,
    starts,
)
from megatron_muon.planning.layout import Parameter

_BUCKET = 128  # elements that Megatron rounds a bucket up to, and to its shards
# Fewer buckets are taken where they cost at most this multiple of the least.
SLACK = 1.05
_GRAD, _PARAM, _PIECE = 4, 2, 2  # bytes of an element in a reduction, an all-gather, the exchange


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter as a rank has it.

    Attributes:
        numel: its elements on a rank.
        muon: its Muon parameter, in any place; None for AdamW's.
    """

    numel: int
    muon: Parameter | None = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """Parameters in Megatron's order that share a grad buffer.

    Attributes:
        weights: the parameters of one rank.
        dp_size: shards of it.
        tp_size: ranks that have slices of the same weights.
    """

    weights: tuple[LocalParameter, ...]
    dp_size: int
    tp_size: int = 1


@dataclass(frozen=True, slots=True)
class BucketCost:
    """The cost of a number of buckets, per step and rank.

    Attributes:
        buckets: in all buffers.
        boundary: parameters of Muon's on more than one rank.
        waited: bytes of the last buckets' gradients and parameters that a rank sends.
        cut: bytes that Muon's exchange sends on an average rank for what is not on the rank that
            has most of its parameter. What TP and balanced homes add hardly depends on buckets.
    """

    buckets: int
    boundary: int
    waited: int
    cut: int

    @property
    def total(self) -> int:
        return self.waited + self.cut


@dataclass(frozen=True, slots=True)
class Choice:
    """``number`` of buckets to ask for, what it costs, and what Megatron's own number would."""

    number: int
    cost: BucketCost
    stock: BucketCost


def stock_bucket_size(dp_size: int) -> int:
    """Elements from which on Megatron closes a bucket if no flag says otherwise."""
    return max(40_000_000, 1_000_000 * dp_size)


def choose(buffers: Sequence[Buffer]) -> Choice | None:
    """The fewest buckets, two at least, that cost little more than the best number.

    None where Megatron itself would not make more of them: there is nothing to choose.
    """
    size = max((buffer.dp_size for buffer in buffers), default=1)
    stock = cost(buffers, stock_bucket_size(size))
    if stock.buckets <= len(buffers):
        return None
    total = sum(weight.numel for buffer in buffers for weight in buffer.weights)
    costs = {number: cost(buffers, total // number) for number in _numbers(stock.buckets)}
    several = {number: one for number, one in costs.items() if one.buckets > len(buffers)}
    if not several:
        return None
    least = min(one.total for one in several.values())
    number = min(number for number, one in several.items() if one.total <= SLACK * least)
    if several[number].buckets >= stock.buckets:
        return None
    return Choice(number, several[number], stock)


def cost(buffers: Sequence[Buffer], bucket_size: int) -> BucketCost:
    """The cost if a bucket is closed as soon as it has ``bucket_size`` elements.

    Args:
        buffers: a rank's.
        bucket_size: in elements.
    """
    count = boundary = waited = cut = 0
    for buffer in buffers:
        size, elements = buffer.dp_size, 0
        for bucket in in_buckets(buffer, bucket_size):
            count += 1
            elements = bucket.numel
            for start, numel, muon in zip(
                starts(bucket.own(), bucket.sizes), bucket.sizes, bucket.muons, strict=True
            ):
                elsewhere = away(start, numel, bucket.numel // size) if muon else 0
                boundary += elsewhere > 0
                cut += 2 * _PIECE * elsewhere // size  # there and back
        waited += (_GRAD + _PARAM) * elements * (size - 1) // size
    return BucketCost(count, boundary, waited, cut)


def exchanged(
    buffers: Sequence[Buffer], bucket_size: int, config: MuonConfig, *, ordered: bool = False
) -> int:
    """Bytes that Muon's exchange sends on an average rank in a step, by plans of each buffer.

    Args:
        buffers: a rank's; those of experts as if its EP rank were the only one.
        bucket_size: in elements.
        config: homes, the two speeds and what Newton-Schulz costs matter.
        ordered: the parameters of each bucket are in the order of ``bucket_order.orders``.
    """
    total = 0
    for buffer in buffers:
        holders = Holders(buffer.dp_size, buffer.tp_size)
        buckets = list(in_buckets(buffer, bucket_size))
        own = [bucket.own() for bucket in buckets]
        by_bucket = orders(buckets, holders, config) if ordered else own
        sent = sent_bytes(buckets, by_bucket, holders, config)
        total += sent // (buffer.dp_size * buffer.tp_size)
    return total


def in_buckets(buffer: Buffer, bucket_size: int) -> Iterator[Bucket]:
    """As Megatron fills them: from the last parameter to the first."""
    position, weights = 0, []
    multiple = lcm(buffer.dp_size, _BUCKET)
    for number, weight in enumerate(reversed(buffer.weights), 1):
        position = -(-position // ALIGNMENT) * ALIGNMENT + weight.numel
        weights.append(weight)
        if position >= bucket_size or number == len(buffer.weights):
            yield Bucket(
                -(-position // multiple) * multiple,
                tuple(one.numel for one in weights),
                tuple(one.muon for one in weights),
            )
            position, weights = 0, []


def _numbers(most: int) -> list[int]:
    """2, 3, 4, ... ``most``, above 16 an eighth apart."""
    numbers = [2]
    while numbers[-1] < most:
        numbers.append(numbers[-1] + max(1, numbers[-1] // 8))
    return [number for number in numbers if number <= most]
