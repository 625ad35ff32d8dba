"""The order of parameters in a bucket, in plain integers; Megatron gets it in test_versions.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.planning.buckets.order import ALIGNMENT, cut_off, shard_order, starts

SIZES = st.lists(st.tuples(st.integers(1, 2000), st.booleans()), min_size=1, max_size=20)


@given(SIZES, st.integers(1, 3000))
def test_each_parameter_is_in_it_once_and_no_more_is_cut_off(
    params: list[tuple[int, bool]], shard: int
) -> None:
    sizes, is_whole = [size for size, _ in params], [whole for _, whole in params]
    order = shard_order(sizes, is_whole, shard)
    assert sorted(order) == list(range(len(sizes)))
    assert cut_off(order, sizes, is_whole, shard) <= cut_off(
        range(len(sizes)), sizes, is_whole, shard
    )
    begun = starts(order, sizes)
    assert all(start % ALIGNMENT == 0 for start in begun)
    ends = [start + sizes[index] for start, index in zip(begun, order, strict=True)]
    assert all(end <= start < end + ALIGNMENT for end, start in zip(ends, begun[1:], strict=False))


@given(SIZES, st.integers(1, 3000))
def test_what_is_cut_off_is_counted_element_by_element(
    params: list[tuple[int, bool]], shard: int
) -> None:
    sizes = [size for size, _ in params]
    order = range(len(sizes))
    away = 0
    for start, size in zip(starts(order, sizes), sizes, strict=True):
        by_shard = [position // shard for position in range(start, start + size)]
        away += size - max(by_shard.count(one) for one in set(by_shard))
    assert cut_off(order, sizes, [True] * len(sizes), shard) == away


def test_where_edges_can_fall_on_edges_they_do() -> None:
    sizes = [64 * units for units in (14, 28, 6, 4) * 4]  # Llama-3-8B's layers, in Megatron's order
    order = shard_order(sizes, [True] * 16, 64 * 26)
    assert cut_off(order, sizes, [True] * 16, 64 * 26) == 4 * 64 * 2  # a fc1 is more than a shard
    halves = shard_order(sizes, [True] * 16, 64 * 52)
    assert cut_off(halves, sizes, [True] * 16, 64 * 52) == 0


def test_what_may_be_cut_is() -> None:
    assert shard_order([100, 640, 6400, 640], [True, True, False, True], 1280) == [2, 1, 3, 0]
