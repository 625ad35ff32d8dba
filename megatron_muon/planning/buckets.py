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
from dataclasses import dataclass
from itertools import chain
from math import lcm

# elements; Megatron starts every parameter at a multiple of it
_ALIGNMENT = 64
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
class Weight:
    """A parameter as a rank has it."""

    numel: int  # number of elements on a rank
    is_muons: bool  # whether a shard's edge in it costs


Buffer = Sequence[Weight]  # that share a grad buffer, in Megatron's order


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of a grad buffer."""

    numel: int  # number of elements, padding included
    # where each parameter starts, in the order in which Megatron fills the bucket
    weights: tuple[tuple[int, Weight], ...]


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
    chosen = choose(buffers)
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


def choose(
    buffers: Sequence[Buffer], dp_size: int = REFERENCE_DP_SIZE
) -> Choice | None:
    """The fewest buckets, two at least, that cost at most ``SLACK`` × the best number.

    None where Megatron's own setting makes no more buckets than that.
    """
    stock = cost(buffers, stock_bucket_size(dp_size), dp_size)
    if stock.buckets <= len(buffers):
        return None
    total = sum(weight.numel for weight in chain.from_iterable(buffers))
    costs = [
        Choice(number, cost(buffers, total // number, dp_size), stock)
        for number in _numbers(stock.buckets)
    ]
    several = [one for one in costs if one.cost.buckets > len(buffers)]
    least = min((one.cost.total for one in several), default=0)
    cheap = (one for one in several if one.cost.total <= SLACK * least)
    chosen = next(cheap, None)
    if chosen is None or chosen.cost.buckets >= stock.buckets:
        return None
    return chosen


def cost(
    buffers: Sequence[Buffer], bucket_size: int, dp_size: int = REFERENCE_DP_SIZE
) -> BucketCost:
    """The cost if a bucket of a rank's buffers is closed as soon as it has so many
    elements.
    """
    count = boundary = waited = cut = 0
    for buffer in buffers:
        elements = 0
        for bucket in in_buckets(buffer, bucket_size, dp_size):
            count += 1
            elements = bucket.numel
            for start, weight in bucket.weights:
                if weight.is_muons:
                    elsewhere = away(start, weight.numel, bucket.numel // dp_size)
                    boundary += elsewhere > 0
                    cut += 2 * _PIECE * elsewhere // dp_size  # there and back
        waited += (_GRAD + _PARAM) * elements * (dp_size - 1) // dp_size
    return BucketCost(count, boundary, waited, cut)


def in_buckets(buffer: Buffer, bucket_size: int, dp_size: int) -> Iterator[Bucket]:
    """The buckets as Megatron fills them: from the last parameter to the first."""
    position, weights = 0, []
    multiple = lcm(dp_size, _BUCKET)
    for number, weight in enumerate(reversed(buffer), 1):
        start = -(-position // _ALIGNMENT) * _ALIGNMENT
        weights.append((start, weight))
        position = start + weight.numel
        if position >= bucket_size or number == len(buffer):
            yield Bucket(-(-position // multiple) * multiple, tuple(weights))
            position, weights = 0, []


def away(start: int, numel: int, shard: int) -> int:
    """Elements of [start, start + numel) outside the shard that has most of them."""
    first = min(shard - start % shard, numel)
    last = min((start + numel - 1) % shard + 1, numel)
    between = (start + numel - 1) // shard - start // shard - 1
    return numel - (shard if between > 0 else max(first, last))


def _numbers(most: int) -> list[int]:
    """2, 3, 4, ... up to ``most``; above 16, in steps of an eighth."""
    numbers = [2]
    while numbers[-1] < most:
        numbers.append(numbers[-1] + max(1, numbers[-1] // 8))
    return [number for number in numbers if number <= most]
