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
from megatron_muon.megatron_lm.bucketing import leaves_buckets
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.buckets.count import (
    REFERENCE_DP_SIZE,
    SLACK,
    Buckets,
    Buffer,
    LocalParameter,
    choose,
    choose_buckets,
    cost,
    in_buckets,
)
from megatron_muon.planning.buckets.order import Holders, sent_bytes
from megatron_muon.planning.layout import UNPLACED, Parameter, whole_matrix
from megatron_muon.settings.config import MuonConfig
from support.models.gpt import Case, Topology, distributed_optimizers, start
from support.models.open_buckets import STOCK, buckets_open
from support.ranks import error_of, run

LOCAL = Case(layers=4, muon=(("homes", "local"),))
# what is cut is parameters
WHOLE = Case(layers=4, muon=(*LOCAL.muon, ("split_qkv", False)))
BALANCED = Case(layers=4, muon=(("homes", "balanced"),))


def _built(case: Case, topology: Topology) -> tuple[int, int, int, Any]:
    """Buckets, boundary parameters and bytes that all ranks send, and what Megatron
    cut.
    """
    built = start(case, topology)
    (megatron,) = distributed_optimizers(built.optimizer)
    plan = megatron.muon.plan
    buckets = sum(len(buffer.buckets) for buffer in megatron.buffers)
    (buffer,) = megatron.buffers
    names = {param: name for name, param in built.params.items()}
    # the first comes last
    order = [names[param] for param in reversed(buffer.param_index_map)]
    muons = {parameter.name: parameter for parameter in plan.parameters}
    weights = [
        LocalParameter(built.params[name].numel(), muons.get(name)) for name in order
    ]
    return buckets, len(plan.boundary_parameters()), sum(plan.sent_bytes()), weights


@pytest.mark.parametrize("bucket_size", [5_000, 20_000, 50_000])
@pytest.mark.parametrize("dp", [2, 3])
def test_the_cost_is_that_of_megatrons_buckets_and_the_plan(
    dp: int, bucket_size: int
) -> None:
    topology = Topology(dp=dp, overlap=True, bucket_size=bucket_size)
    for buckets, boundary, sent, weights in run(_built, dp, WHOLE, topology):
        priced = cost([Buffer(tuple(weights), Holders(dp))], bucket_size)
        assert (priced.buckets, priced.boundary) == (buckets, boundary)
        # of each parameter the bytes are divided by the ranks, and rounded down
        assert sent / dp - len(weights) <= priced.cut <= sent / dp
        assert buckets > 1 and boundary > 1 and sent > 0


@pytest.mark.parametrize("case", [LOCAL, BALANCED], ids=["local", "balanced"])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_exchanged_is_what_the_plan_sends(tp: int, case: Case) -> None:
    topology = Topology(tp=tp, dp=2, overlap=True, bucket_size=20_000)
    numerics = Numerics(MuonConfig(**dict(case.muon), split_matrices="off"))
    for *_, sent, weights in run(_built, topology.world_size, case, topology):
        buckets = list(in_buckets(Buffer(tuple(weights), Holders(2, tp)), 20_000))
        own = [bucket.stock_order() for bucket in buckets]
        assert sent_bytes(buckets, own, Holders(2, tp), numerics) == sent > 0


def _weight(numel: int, muon: bool = True) -> LocalParameter:
    matrices, blocks = whole_matrix("", (1, numel), 0, 1)
    parameter = Parameter("", (1, numel), 0, UNPLACED, UNPLACED, 0, matrices, blocks)
    return LocalParameter(numel, parameter if muon else None)


@given(
    st.lists(
        st.tuples(st.integers(1, 90_000_000), st.booleans()), min_size=1, max_size=20
    ),
    st.integers(1, 64),
)
def test_no_number_costs_much_less_and_the_overlap_stays(
    weights: list[tuple[int, bool]], dp_size: int
) -> None:
    buffer = Buffer(tuple(_weight(*weight) for weight in weights), Holders(dp_size))
    chosen = choose([buffer])
    if chosen is None:
        return
    assert 1 < chosen.cost.buckets < chosen.stock.buckets
    total = sum(weight.numel for weight in buffer.weights)
    assert chosen.cost == cost([buffer], total // chosen.number)
    for number in range(2, min(16, chosen.stock.buckets) + 1):
        other = cost([buffer], total // number)
        if other.buckets > 1:
            assert chosen.cost.total <= SLACK * other.total
            if other.total < chosen.cost.total / SLACK:
                assert number > chosen.number


# --- from the parameters of a model --------------------------------------------------


def test_llama_3_8b_keeps_the_overlap_at_less_than_half_of_stock_buckets_exchange() -> (
    None
):
    """Design section 4: at most buckets × (DP - 1) boundary parameters."""
    chosen = choose([whole_buffer(REFERENCE_DP_SIZE)])
    assert chosen is not None
    assert 1 < chosen.cost.buckets < chosen.stock.buckets
    assert chosen.cost.boundary <= 7 * chosen.cost.buckets < chosen.stock.boundary
    assert chosen.cost.cut < chosen.stock.cut / 2
    assert chosen.cost.waited < 1.1 * chosen.stock.waited


def test_the_number_does_not_depend_on_the_ranks() -> None:
    """AdamW's dp_reshardable loads at another DP size, but not into other buckets."""
    numbers = set()
    for dp_size in (2, 8, 512):
        chosen = choose_buckets([whole_buffer(dp_size)])
        assert f"{chosen.number} buckets in place of" in chosen.reason
        numbers.add(chosen.number)
    assert len(numbers) == 1


def test_a_small_model_keeps_megatrons_buckets_and_says_so() -> None:
    small = replace(whole_buffer(8), weights=(_weight(50_000_000),))
    chosen = choose_buckets([small])
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
    ids=str,
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
    ("case", "topology"),
    [
        pytest.param(EIGHT, T(tp=2, pp=2, overlap=True), id="tp2-pp2"),
        pytest.param(EIGHT, T(pp=2, chunks=2, overlap=True), id="pp2-vpp2"),
        pytest.param(EIGHT, T(pp=2, first_layers=6, overlap=True), id="uneven"),
        pytest.param(replace(EIGHT, moe=True), T(dp=2, ep=2, overlap=True), id="ep2"),
        pytest.param(replace(EIGHT, mtp=True), T(dp=2, overlap=True), id="mtp"),
        pytest.param(replace(EIGHT, mixer="mamba"), T(tp=2, overlap=True), id="hybrid"),
    ],
)
def test_the_first_chunk_of_the_first_stage_is_cut_by_the_chosen_number(
    case: Case, topology: Topology
) -> None:
    first, *others = run(_cut, topology.world_size, case, topology)
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


@pytest.mark.parametrize("topology", [T(dp=2, overlap=True), T(tp=2, overlap=True)])
def test_ranks_of_the_stage_that_choose_another_number_are_named(
    topology: Topology,
) -> None:
    for error in run(_error_of_another, 2, topology):
        assert error.startswith("PlanMismatchError: ranks disagree, first at "), error
        assert "bucket [" in error and "rank 1" in error
