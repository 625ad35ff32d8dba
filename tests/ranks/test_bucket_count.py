"""The number of buckets: its cost is that of Megatron's own buckets and of the real
plan.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from figures.llama import whole_buffer
from megatron_muon.mcore.wiring.buffers import bucket_layout
from megatron_muon.megatron_lm.flags.namespace import leaves_buckets
from megatron_muon.planning.buckets import (
    REFERENCE_DP_SIZE,
    SLACK,
    Buckets,
    Weight,
    away,
    choose,
    choose_buckets,
    cost,
)
from support.models.gpt import Case, Topology, on_ranks, start
from support.models.open_buckets import STOCK, buckets_open
from support.ranks import error_of, run
from support.runs.topologies import DP2_OVERLAP

LOCAL = Case(layers=4).with_muon(homes="local")
# what is cut is parameters
WHOLE = LOCAL.with_muon(split_qkv=False)


def _built(case: Case, topology: Topology) -> tuple[int, int, int, Any]:
    """Buckets, boundary parameters and bytes that all ranks send, and what Megatron
    cut.
    """
    built = start(case, topology)
    megatron = built.part
    plan = megatron.muon.plan
    buckets = sum(len(buffer.buckets) for buffer in megatron.buffers)
    (buffer,) = megatron.buffers
    names = {param: name for name, param in built.params.items()}
    # the first comes last
    order = [names[param] for param in reversed(buffer.param_index_map)]
    muons = {parameter.name for parameter in plan.parameters}
    weights = [Weight(built.params[name].numel(), name in muons) for name in order]
    return buckets, len(plan.boundary_parameters()), sum(plan.sent_bytes()), weights


@pytest.mark.parametrize("bucket_size", [5_000, 20_000, 50_000])
@pytest.mark.parametrize("dp", [2, 3])
def test_the_cost_is_that_of_megatrons_buckets_and_the_plan(
    dp: int, bucket_size: int
) -> None:
    topology = Topology(dp=dp, overlap=True, bucket_size=bucket_size)
    for buckets, boundary, sent, weights in run(_built, dp, WHOLE, topology):
        priced = cost([weights], bucket_size, dp)
        assert (priced.buckets, priced.boundary) == (buckets, boundary)
        # of each parameter the bytes are divided by the ranks, and rounded down
        assert sent / dp - len(weights) <= priced.cut <= sent / dp
        assert buckets > 1 and boundary > 1 and sent > 0


@given(st.integers(0, 3000), st.integers(1, 2000), st.integers(1, 3000))
def test_what_a_shard_edge_cuts_off_is_counted_element_by_element(
    start: int, numel: int, shard: int
) -> None:
    by_shard = [position // shard for position in range(start, start + numel)]
    most = max(by_shard.count(one) for one in set(by_shard))
    assert away(start, numel, shard) == numel - most


@given(
    st.lists(
        st.tuples(st.integers(1, 90_000_000), st.booleans()), min_size=1, max_size=20
    ),
    st.integers(1, 64),
)
def test_no_number_costs_much_less_and_the_overlap_stays(
    weights: list[tuple[int, bool]], dp_size: int
) -> None:
    buffer = [Weight(*weight) for weight in weights]
    chosen = choose([buffer], dp_size)
    if chosen is None:
        return
    assert 1 < chosen.cost.buckets < chosen.stock.buckets
    total = sum(weight.numel for weight in buffer)
    assert chosen.cost == cost([buffer], total // chosen.number, dp_size)
    for number in range(2, min(16, chosen.stock.buckets) + 1):
        other = cost([buffer], total // number, dp_size)
        if other.buckets > 1:
            assert chosen.cost.total <= SLACK * other.total
            if other.total < chosen.cost.total / SLACK:
                assert number > chosen.number


# --- from the parameters of a model --------------------------------------------------


def test_llama_3_8b_keeps_the_overlap_at_less_than_half_of_stock_buckets_exchange() -> (
    None
):
    """Design section 4: at most buckets × (DP - 1) boundary parameters."""
    chosen = choose([whole_buffer()])
    assert chosen is not None
    assert 1 < chosen.cost.buckets < chosen.stock.buckets
    assert (
        chosen.cost.boundary
        <= (REFERENCE_DP_SIZE - 1) * chosen.cost.buckets
        < chosen.stock.boundary
    )
    assert chosen.cost.cut < chosen.stock.cut / 2
    assert chosen.cost.waited < 1.1 * chosen.stock.waited


def test_a_small_model_keeps_megatrons_buckets_and_says_so() -> None:
    chosen = choose_buckets([[Weight(50_000_000, is_muons=True)]])
    assert chosen.number is None
    assert "fewer that keep the overlap" in chosen.reason


FREE = {
    "muon_dp_layout": "contiguous",
    "overlap_grad_reduce": True,
    "ddp_num_buckets": None,
    "ddp_bucket_size": None,
}


@pytest.mark.parametrize(
    "given",
    [
        {"muon_dp_layout": "bucketed"},
        {"overlap_grad_reduce": False},
        {"ddp_num_buckets": 3},
        {"ddp_bucket_size": 1000},
        {"overlap_param_gather_with_optimizer_step": True},
    ],
)
def test_what_is_given_wins(given: dict[str, Any]) -> None:
    assert not leaves_buckets(Namespace(**FREE | given))
    assert leaves_buckets(Namespace(**FREE))


def _cut(case: Case, topology: Topology) -> tuple[Buckets, list[int], int, int | None]:
    """What is chosen, the buckets of each buffer, and of the first chunk its elements
    and the size at which Megatron closes a bucket.
    """
    with buckets_open() as loop:
        built = start(case, topology)
    first = built.chunks[0]
    elements = sum(p.numel() for p in first.parameters() if p.requires_grad)
    (chosen,) = loop.taken  # of the first chunk alone
    buckets = [len(buffer.buckets) for buffer in built.buffers()]
    return chosen, buckets, elements, first.bucket_size


T = Topology
EIGHT = Case(layers=8)


@pytest.mark.parametrize(
    "case, topology",
    [
        (EIGHT, T.of("tp2 pp2 overlap")),
        (EIGHT, T.of("pp2 overlap chunks2")),
        (EIGHT, T.of("pp2 overlap first_layers6")),
        (replace(EIGHT, moe=True), T.of("dp2 overlap ep2")),
        (replace(EIGHT, mtp=True), DP2_OVERLAP),
        (replace(EIGHT, mixer="mamba"), T.of("tp2 overlap")),
    ],
)
def test_the_first_chunk_of_the_first_stage_is_cut_by_the_chosen_number(
    case: Case, topology: Topology
) -> None:
    first, *others = on_ranks(_cut, case, topology)
    chosen, buckets, elements, bucket_size = first
    assert chosen.number is not None and bucket_size == elements // chosen.number
    assert max(buckets) > 1 and sum(buckets) < elements // STOCK
    for other in others:
        later_stage = Buckets(), [1] * len(other[1])
        assert other == first or other[:2] == later_stage


def _other_number(buffers: object) -> Buckets:
    return Buckets(2 + dist.get_rank())


def _error_of_another(topology: Topology) -> str:
    with (
        buckets_open(),
        mock.patch.object(bucket_layout, "choose_buckets", _other_number),
    ):
        return error_of(lambda: start(EIGHT, topology))


@pytest.mark.parametrize("topology", [DP2_OVERLAP, T.of("tp2 overlap")])
def test_ranks_of_the_stage_that_choose_another_number_are_named(
    topology: Topology,
) -> None:
    for error in run(_error_of_another, 2, topology):
        assert error.startswith("PlanMismatchError: ranks disagree, first at "), error
        assert "bucket [" in error and "rank 1" in error
