"""The number of buckets: its cost is that of Megatron's own buckets and of the real
plan.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.megatron_lm import install
from megatron_muon.megatron_lm.bucketing import buffers, choose_buckets
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.buckets.count import (
    SLACK,
    Buffer,
    LocalParameter,
    choose,
    cost,
    in_buckets,
)
from megatron_muon.planning.buckets.order import UNPLACED, Holders, sent_bytes
from megatron_muon.planning.layout import Parameter, whole_matrix
from megatron_muon.settings.config import MuonConfig
from support.models.gpt import Case, Topology, distributed_optimizers, start
from support.ranks import run

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
        own = [bucket.own() for bucket in buckets]
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


# --- from Megatron's arguments --------------------------------------------------------

LLAMA_3_8B = Namespace(
    **{"muon_dp_layout": "contiguous", "overlap_grad_reduce": True}
    | {"ddp_num_buckets": None, "ddp_bucket_size": None, "padded_vocab_size": 128256}
    | {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "num_layers": 32,
    }
    | {"group_query_attention": True, "num_query_groups": 8, "ffn_hidden_size": 14336}
    | {"swiglu": True, "untie_embeddings_and_output_weights": True, "num_experts": None}
    | {"multi_latent_attention": False, "virtual_pipeline_model_parallel_size": None}
    | {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "world_size": 8,
    }
    | {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    | {"num_distributed_optimizer_instances": 1}
)
DEEPSEEK_V3 = Namespace(
    **vars(LLAMA_3_8B)
    | {"padded_vocab_size": 129280, "hidden_size": 7168, "num_layers": 61}
    | {"num_attention_heads": 128, "multi_latent_attention": True, "q_lora_rank": 1536}
    | {
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
    }
    | {"ffn_hidden_size": 18432, "num_experts": 256, "moe_ffn_hidden_size": 2048}
    | {
        "moe_shared_expert_intermediate_size": 2048,
        "moe_layer_freq": [0] * 3 + [1] * 58,
    }
    | {"moe_grouped_gemm": True}
)


@pytest.mark.parametrize(
    ("args", "published"), [(LLAMA_3_8B, 8_030_261_248), (DEEPSEEK_V3, 671_026_419_200)]
)
def test_the_buffers_have_the_models_elements(args: Namespace, published: int) -> None:
    """All but norms and routers, which are far below one in a thousand."""
    numel = sum(
        weight.numel for buffer in buffers(args, 8) for weight in buffer.weights
    )
    assert 0.999 * published < numel < published


def test_llama_3_8b_keeps_the_overlap_at_less_than_half_of_stock_buckets_exchange() -> (
    None
):
    """Design section 4: at most buckets × (DP - 1) boundary parameters."""
    chosen = choose(buffers(LLAMA_3_8B, 8))
    assert chosen is not None
    assert 1 < chosen.cost.buckets < chosen.stock.buckets
    assert chosen.cost.boundary <= 7 * chosen.cost.buckets < chosen.stock.boundary
    assert chosen.cost.cut < chosen.stock.cut / 2
    assert chosen.cost.waited < 1.1 * chosen.stock.waited


def test_the_number_does_not_depend_on_the_ranks() -> None:
    """AdamW's dp_reshardable loads at another DP size, but not into other buckets."""
    numbers = set()
    for world_size in (2, 8, 512):
        args = Namespace(**{**vars(LLAMA_3_8B), "world_size": world_size})
        (line,) = choose_buckets(args)
        assert f"{args.ddp_num_buckets} buckets in place of" in line
        numbers.add(args.ddp_num_buckets)
    assert len(numbers) == 1


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
    args = Namespace(**{**vars(LLAMA_3_8B), **given})
    assert choose_buckets(args) == []
    assert args.ddp_num_buckets == given.get("ddp_num_buckets")


@pytest.mark.parametrize("layers", [32, 2])
def test_a_small_model_keeps_megatrons_buckets_and_says_so(layers: int) -> None:
    small = {"hidden_size": 256, "ffn_hidden_size": 1024, "num_layers": layers}
    if layers == 2:
        small["padded_vocab_size"] = 32_000
    args = Namespace(**{**vars(LLAMA_3_8B), **small})
    (line,) = choose_buckets(args)
    assert "fewer that keep the overlap" in line and args.ddp_num_buckets is None


@pytest.mark.parametrize(
    ("model", "given", "weight"),
    [
        (LLAMA_3_8B, {"ffn_hidden_size": 150}, "0.mlp.linear_fc1: 4 TP ranks"),
        (
            LLAMA_3_8B,
            {"num_query_groups": 1, "kv_channels": 99},
            "0.self_attention.linear_qkv: ",
        ),
        (
            DEEPSEEK_V3,
            {"moe_shared_expert_intermediate_size": 150},
            "3.mlp.shared_experts.linear",
        ),
        (
            DEEPSEEK_V3,
            {"moe_ffn_hidden_size": 150},
            "3.mlp.experts.linear_fc1: 4 TP ranks",
        ),
    ],
    ids=["mlp", "attention", "shared expert", "experts"],
)
def test_what_tp_cannot_split_is_named(
    model: Namespace, given: dict[str, Any], weight: str
) -> None:
    tp = {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 4}
    args = Namespace(**{**vars(model), **tp, **given})
    with pytest.raises(ValueError, match=rf"^decoder\.layers\.{weight}"):
        choose_buckets(args)


def test_a_hybrid_model_keeps_megatrons_buckets_and_says_so() -> None:
    args = Namespace(**vars(LLAMA_3_8B), hybrid_override_pattern="M-M*")
    (line,) = choose_buckets(args)
    assert "Megatron's own buckets" in line and args.ddp_num_buckets is None


def test_the_number_waits_for_a_vocabulary_that_only_the_tokenizer_knows() -> None:
    args = Namespace(**{**vars(LLAMA_3_8B), "padded_vocab_size": None}, vocab_size=None)
    args.optimizer = "muon"
    names = ("_turn_on", "_on_the_cpu", "_settled", "agree_on_settings")
    nothing = {
        name: lambda *args, **options: [] for name in (*names, "check_arguments")
    }
    training = {"megatron.training": SimpleNamespace(get_args=lambda: args)}
    with (
        mock.patch.multiple(install, asks_for_muon=lambda args: True, **nothing),
        mock.patch.dict(sys.modules, training),
    ):
        install._validate_args(lambda *_: None, args)
        args.megatron_muon = True
        install._validate_args(lambda *_: None, args)  # as some scripts do
        assert args.ddp_num_buckets is None
        # as set_global_variables does
        args.padded_vocab_size = LLAMA_3_8B.padded_vocab_size
        install._initialize_megatron(lambda: None)
    chosen = choose(buffers(LLAMA_3_8B, 8))
    assert chosen is not None and args.ddp_num_buckets == chosen.number
