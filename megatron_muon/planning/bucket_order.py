"""In which order parameters fill a bucket, so that the cuts of its shards fall on their edges.

Plain integers, the same on every rank. A parameter that a shard's edge cuts has to move; Megatron's
order, that of the model backwards, leaves it to chance where edges fall. From core 0.18 on a layout
may be given to Megatron: see ``mcore.params.bucket_layout``.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIGNMENT = 64  # elements: where Megatron lets a parameter start


def shard_order(sizes: Sequence[int], is_whole: Sequence[bool], shard: int) -> list[int]:
    """Indices of a bucket's parameters in the order in which to put them.

    At an edge the largest that is left is put, which may be larger than a shard; elsewhere the
    largest that ends before the next edge or, where none does, the one of which least is cut off.
    Megatron's own order is kept unless less is cut off in this one.

    Args:
        sizes: elements of each, in Megatron's order.
        is_whole: whether it matters that one is cut.
        shard: elements between two edges.
    """
    own = list(range(len(sizes)))
    left, order, position = set(own), [], 0
    while left:
        index = _next(left, sizes, is_whole, shard, position)
        left.remove(index)
        order.append(index)
        position = _aligned(position + sizes[index])
    found, stock = (cut_off(by, sizes, is_whole, shard) for by in (order, own))
    return order if found < stock else own


def starts(order: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Where each parameter of ``order`` starts."""
    position, found = 0, []
    for index in order:
        found.append(position)
        position = _aligned(position + sizes[index])
    return found


def cut_off(
    order: Sequence[int], sizes: Sequence[int], is_whole: Sequence[bool], shard: int
) -> int:
    """Elements that are not in the shard which has most of their parameter."""
    return sum(
        away(start, sizes[index], shard)
        for index, start in zip(order, starts(order, sizes), strict=True)
        if is_whole[index]
    )


def _next(
    left: set[int], sizes: Sequence[int], is_whole: Sequence[bool], shard: int, position: int
) -> int:
    room = shard - position % shard
    fitting = left if room == shard else {index for index in left if sizes[index] <= room}
    if fitting:
        return min(fitting, key=lambda index: (-sizes[index], index))
    indifferent = {index for index in left if not is_whole[index]}
    if indifferent:
        return min(indifferent, key=lambda index: (-sizes[index], index))
    return min(left, key=lambda index: (away(position, sizes[index], shard), index))


def away(start: int, numel: int, shard: int) -> int:
    """Elements of [start, start + numel) that are not in the shard that has most of them."""
    first = min(shard - start % shard, numel)
    last = min((start + numel - 1) % shard + 1, numel)
    between = (start + numel - 1) // shard - start // shard - 1
    return numel - (shard if between > 0 else max(first, last))


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
