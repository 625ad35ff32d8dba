"""How many buckets of gradients cost least where Megatron overlaps their reduction with backward.

Of two things a step has to wait, or may: of the last bucket's gradients, whose reduction nothing is
left to hide, and its parameters, which the next forward pass needs first; and of Muon's exchange,
since every edge of a shard cuts a parameter and every bucket has ``dp_size - 1`` such edges. Many
buckets make the first small, few the second. Both go over the same links, so bytes are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from megatron_muon.ordering import ALIGNMENT, away, shard_order, starts

_BUCKET = 128  # elements that Megatron rounds a bucket up to, and to its shards
# Fewer buckets are taken where they cost at most this multiple of the least.
SLACK = 1.05
_GRAD, _PARAM, _PIECE = 4, 2, 2  # bytes of an element in a reduction, an all-gather, the exchange


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter as a rank has it: its elements, and whether they are Muon's."""

    numel: int
    muon: bool


@dataclass(frozen=True, slots=True)
class Buffer:
    """Parameters in Megatron's order that share a grad buffer, cut into ``dp_size`` shards."""

    weights: tuple[Weight, ...]
    dp_size: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a number of buckets, in a step, per rank.

    Attributes:
        buckets: in all buffers.
        boundary: parameters of Muon's on more than one rank.
        waited: bytes of the last buckets' gradients and parameters that a rank sends.
        exchanged: bytes that Muon's exchange sends on an average rank, with each parameter at the
            rank that has most of it; where one holds several matrices they send somewhat less.
    """

    buckets: int
    boundary: int
    waited: int
    exchanged: int

    @property
    def total(self) -> int:
        return self.waited + self.exchanged


@dataclass(frozen=True, slots=True)
class Choice:
    """``number`` of buckets to ask for, what it costs, and what Megatron's own number would."""

    number: int
    cost: Cost
    stock: Cost


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


def cost(buffers: Sequence[Buffer], bucket_size: int, *, ordered: bool = False) -> Cost:
    """What it comes to if a bucket is closed as soon as it has ``bucket_size`` elements.

    Args:
        buffers: of a rank.
        bucket_size: in elements.
        ordered: the parameters of each bucket are in the order of ``ordering.shard_order``.
    """
    buckets = boundary = waited = exchanged = 0
    for buffer in buffers:
        size = buffer.dp_size
        elements = 0
        for bucket in _buckets(buffer, bucket_size):
            buckets += 1
            elements = bucket.size
            for start, stop in _in_order(bucket, size) if ordered else bucket.muon:
                moved = away(start, stop - start, bucket.size // size)
                boundary += moved > 0
                exchanged += 2 * _PIECE * moved // size  # there and back
        waited += (_GRAD + _PARAM) * elements * (size - 1) // size
    return Cost(buckets, boundary, waited, exchanged)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Its elements with padding, its parameters and the ranges of Muon's in it."""

    size: int
    weights: tuple[Weight, ...]
    muon: tuple[tuple[int, int], ...]


def _in_order(bucket: _Bucket, shards: int) -> list[tuple[int, int]]:
    """The ranges of Muon's parameters in the order in which shards cut few."""
    sizes = [weight.numel for weight in bucket.weights]
    order = shard_order(sizes, [weight.muon for weight in bucket.weights], bucket.size // shards)
    return [
        (start, start + sizes[index])
        for index, start in zip(order, starts(order, sizes), strict=True)
        if bucket.weights[index].muon
    ]


def _buckets(buffer: Buffer, bucket_size: int) -> Iterator[_Bucket]:
    """As Megatron fills them: from the last parameter to the first."""
    position, muon, weights = 0, [], []
    multiple = lcm(buffer.dp_size, _BUCKET)
    for number, weight in enumerate(reversed(buffer.weights), 1):
        start = -(-position // ALIGNMENT) * ALIGNMENT
        position = start + weight.numel
        weights.append(weight)
        if weight.muon:
            muon.append((start, position))
        if position >= bucket_size or number == len(buffer.weights):
            yield _Bucket(-(-position // multiple) * multiple, tuple(weights), tuple(muon))
            position, muon, weights = 0, [], []


def _numbers(most: int) -> list[int]:
    """2, 3, 4, ... ``most``, above 16 an eighth apart."""
    numbers = [2]
    while numbers[-1] < most:
        numbers.append(numbers[-1] + max(1, numbers[-1] // 8))
    return [number for number in numbers if number <= most]
