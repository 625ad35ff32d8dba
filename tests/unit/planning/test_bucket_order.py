"""Which order of a buffer's parameters is kept; Megatron gets it in
test_versions.py.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from figures.llama import WHOLE, contiguous_bucket_size, whole_buffer
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.buckets.count import in_buckets
from megatron_muon.planning.buckets.order import (
    ALIGNMENT,
    Bucket,
    Holders,
    cut_off,
    orders,
    parameters_in,
    sent_bytes,
    shard_order,
    starts,
)
from megatron_muon.planning.layout import UNPLACED, Parameter, whole_matrix
from megatron_muon.settings.config import HomePolicy, MuonConfig

BUCKETS = st.lists(
    st.lists(st.tuples(st.integers(1, 2000), st.booleans()), min_size=1, max_size=8),
    min_size=1,
    max_size=3,
)


def _muon(numel: int, tp_size: int) -> Parameter:
    matrices, blocks = whole_matrix("", (1, numel), 0, tp_size)
    return Parameter("", (1, numel), 0, UNPLACED, UNPLACED, 0, matrices, blocks)


@given(
    BUCKETS,
    st.integers(1, 6),
    st.integers(1, 2),
    st.sampled_from(["local", "balanced"]),
)
def test_an_order_is_kept_only_where_it_sends_less(
    weights: list[list[tuple[int, bool]]], dp_size: int, tp_size: int, homes: HomePolicy
) -> None:
    buckets = []
    for of_bucket in weights:
        sizes = tuple(size for size, _ in of_bucket)
        muons = tuple(
            _muon(size, tp_size) if muon else None for size, muon in of_bucket
        )
        whole = starts(range(len(sizes)), sizes)[-1] + sizes[-1]
        buckets.append(
            Bucket(-(-whole // (128 * dp_size)) * 128 * dp_size, sizes, muons)
        )
    config = MuonConfig(homes=homes)
    holders = Holders(dp_size, tp_size)
    found = orders(buckets, holders, Numerics(config))
    own = [bucket.stock_order() for bucket in buckets]
    before, after = (
        sent_bytes(buckets, each, holders, Numerics(config)) for each in (own, found)
    )
    assert after < before or found == own
    assert [sorted(order) for order in found] == own
    assert all(p.span.stop <= p.bucket.stop for p in parameters_in(buckets, found))


def test_llama_3_8b_is_ordered_in_one_bucket_only_where_homes_are_local() -> None:
    """Where none is cut, balance moves whole matrices: 1.34 % of AdamW's bytes, not
    0.62 %.
    """
    balanced = MuonConfig(homes="balanced")
    local = MuonConfig(homes="local")
    (bucket,) = one = list(in_buckets(whole_buffer(8), WHOLE))
    assert (
        orders(one, Holders(8), Numerics(balanced))
        == [bucket.stock_order()]
        != orders(one, Holders(8), Numerics(local))
    )
    several = list(in_buckets(whole_buffer(8), contiguous_bucket_size()))
    assert orders(several, Holders(8), Numerics(balanced)) != [
        each.stock_order() for each in several
    ]


SIZES = st.lists(
    st.tuples(st.integers(1, 2000), st.booleans()), min_size=1, max_size=20
)


@given(SIZES, st.integers(1, 3000))
def test_each_parameter_is_in_it_once_and_no_more_is_cut_off(
    params: list[tuple[int, bool]], shard: int
) -> None:
    sizes = [size for size, _ in params]
    is_whole = [whole for _, whole in params]
    order = shard_order(sizes, is_whole, shard)
    assert sorted(order) == list(range(len(sizes)))
    assert cut_off(order, sizes, is_whole, shard) <= cut_off(
        range(len(sizes)), sizes, is_whole, shard
    )
    begun = starts(order, sizes)
    assert all(start % ALIGNMENT == 0 for start in begun)
    ends = [start + sizes[index] for start, index in zip(begun, order, strict=True)]
    assert all(
        end <= start < end + ALIGNMENT
        for end, start in zip(ends, begun[1:], strict=False)
    )


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
    # Llama-3-8B's layers, in Megatron's order
    sizes = [64 * units for units in (14, 28, 6, 4) * 4]
    order = shard_order(sizes, [True] * 16, 64 * 26)
    # a fc1 is more than a shard
    assert cut_off(order, sizes, [True] * 16, 64 * 26) == 4 * 64 * 2
    halves = shard_order(sizes, [True] * 16, 64 * 52)
    assert cut_off(halves, sizes, [True] * 16, 64 * 52) == 0


def test_what_may_be_cut_is() -> None:
    assert shard_order([100, 640, 6400, 640], [True, True, False, True], 1280) == [
        2,
        1,
        3,
        0,
    ]
