"""The number of buckets that costs least where Megatron overlaps their reduction with
backward.

Where it does not, and on later pipeline stages, a buffer is one bucket, so shards are
contiguous. With the overlap, Megatron's buckets have about 40 M elements, whose shards
cut nearly every parameter of a large model. The fewest that keep the overlap are taken.

A step may have to wait for two things. One is the last bucket: no backward pass hides
the reduction of its gradients, and the next forward pass needs its parameters first.
The other is Muon's exchange: each of a bucket's ``dp_size - 1`` shard edges cuts a
parameter. More buckets make the first wait shorter and the second longer. Both use the
same links, so bytes are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

from megatron_muon.planning.buckets.order import (
    ALIGNMENT,
    Bucket,
    Holders,
    away,
    starts,
)
from megatron_muon.planning.layout import Parameter

# elements; Megatron rounds a bucket up to a multiple of this and of its shards
_BUCKET = 128
# The fewest buckets are taken that cost at most this multiple of the least.
SLACK = 1.05
# The number of buckets must not depend on the number of ranks. A run may start from an
# AdamW checkpoint in dp_reshardable, which loads at another DP size, but not into other
# buckets. A small size is taken since the exchange costs most with few ranks.
REFERENCE_DP_SIZE = 8
# bytes of an element in a reduction, an all-gather, the exchange
_GRAD, _PARAM, _PIECE = (4, 2, 2)


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter as a rank has it."""

    numel: int  # number of elements on a rank
    # its Muon parameter, with any bucket and span; None for AdamW's
    muon: Parameter | None = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """Parameters in Megatron's order that share a grad buffer."""

    weights: tuple[LocalParameter, ...]  # the parameters, as one rank has them
    holders: Holders  # the ranks that have it

    @property
    def numel(self) -> int:
        """Elements of its parameters on one rank."""
        return sum(weight.numel for weight in self.weights)


@dataclass(frozen=True, slots=True)
class BucketCost:
    """The cost of a number of buckets, per step and rank."""

    buckets: int  # number in all buffers
    boundary: int  # number of Muon's parameters that shard edges cut
    waited: int  # bytes that a rank sends of the last buckets' gradients and parameters
    # bytes that Muon's exchange sends on an average rank for elements outside the shard
    # that has most of their parameter. TP and balanced homes add bytes too, but these
    # hardly depend on buckets.
    cut: int

    @property
    def total(self) -> int:
        return self.waited + self.cut


@dataclass(frozen=True, slots=True)
class Choice:
    """``number`` of buckets to ask for, its cost, and the cost of Megatron's own
    number.
    """

    number: int
    cost: BucketCost
    stock: BucketCost


@dataclass(frozen=True, slots=True)
class Buckets:
    """What the first pipeline stage chooses for its grad buffers."""

    # number of buckets of the first model chunk; None: as many as Megatron makes
    number: int | None = None
    reason: str = ""  # a line to print


def stock_bucket_size(dp_size: int) -> int:
    """Elements at which Megatron closes a bucket if no flag says otherwise."""
    return max(40_000_000, 1_000_000 * dp_size)


def choose_buckets(buffers: Sequence[Buffer]) -> Buckets:
    """The buckets of a stage whose reduction of gradients overlaps.

    Args:
        buffers: those of the first model chunk.
    """
    chosen = choose(at_reference(buffers))
    if chosen is None:
        return Buckets(
            reason="--muon-dp-layout contiguous: Megatron's own buckets, of about 40 M "
            "elements: fewer that keep the overlap would not send less on the first "
            "pipeline stage"
        )
    return Buckets(
        chosen.number,
        f"--muon-dp-layout contiguous: about {chosen.cost.buckets} buckets in place of "
        f"{chosen.stock.buckets} on the first pipeline stage, the fewest that keep the "
        "overlap. --ddp-num-buckets sets another number",
    )


def at_reference(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The same buffers, each with ``REFERENCE_DP_SIZE`` shards."""
    return [
        replace(buffer, holders=replace(buffer.holders, dp_size=REFERENCE_DP_SIZE))
        for buffer in buffers
    ]


def choose(buffers: Sequence[Buffer]) -> Choice | None:
    """The fewest buckets, two at least, that cost at most ``SLACK`` × the best number.

    None where Megatron's own setting makes no more buckets than that.
    """
    size = max((buffer.holders.dp_size for buffer in buffers), default=1)
    stock = cost(buffers, stock_bucket_size(size))
    if stock.buckets <= len(buffers):
        return None
    total = sum(buffer.numel for buffer in buffers)
    costs = [
        Choice(number, cost(buffers, total // number), stock)
        for number in _numbers(stock.buckets)
    ]
    several = [one for one in costs if one.cost.buckets > len(buffers)]
    least = min((one.cost.total for one in several), default=0)
    cheap = (one for one in several if one.cost.total <= SLACK * least)
    chosen = next(cheap, None)
    if chosen is None or chosen.cost.buckets >= stock.buckets:
        return None
    return chosen


def cost(buffers: Sequence[Buffer], bucket_size: int) -> BucketCost:
    """The cost if a bucket of a rank's buffers is closed as soon as it has so many
    elements.
    """
    count = boundary = waited = cut = 0
    for buffer in buffers:
        size, elements = buffer.holders.dp_size, 0
        for bucket in in_buckets(buffer, bucket_size):
            count += 1
            elements = bucket.numel
            for start, numel, muon in zip(
                starts(bucket.stock_order(), bucket.sizes),
                bucket.sizes,
                bucket.muons,
                strict=True,
            ):
                elsewhere = away(start, numel, bucket.numel // size) if muon else 0
                boundary += elsewhere > 0
                cut += 2 * _PIECE * elsewhere // size  # there and back
        waited += (_GRAD + _PARAM) * elements * (size - 1) // size
    return BucketCost(count, boundary, waited, cut)


def in_buckets(buffer: Buffer, bucket_size: int) -> Iterator[Bucket]:
    """The buckets as Megatron fills them: from the last parameter to the first."""
    position, weights = 0, []
    multiple = lcm(buffer.holders.dp_size, _BUCKET)
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
    """2, 3, 4, ... up to ``most``; above 16, in steps of an eighth."""
    numbers = [2]
    while numbers[-1] < most:
        numbers.append(numbers[-1] + max(1, numbers[-1] // 8))
    return [number for number in numbers if number <= most]
