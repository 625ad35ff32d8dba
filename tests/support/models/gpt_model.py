"""Build the model chunks of a rank, and say which part of which whole parameter each
one holds.

The parts are known from the model's plan, not from the marks on the parameters: those
of Transformer Engine are wrong, and telling so is the optimizer's work.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from support import te_on_cpu
from support.installed import VERSION
from support.models.local_hybrid import build_mamba, gated_delta_spec, without_fla
from support.runs.cases import (
    DELTA,
    EXPERTS,
    HEAD_SIZE,
    HIDDEN,
    IN_PROJ,
    KV_RANK,
    MAMBA,
    MOE_FFN,
    Q_RANK,
    ROPE_HEAD,
    SEQUENCE,
    SHARED_FFN,
    TIED,
    Case,
    Topology,
)
from support.runs.whole import Cut, Piece

LAYERS_PREFIX = "decoder.layers."
DOWN_PROJECTIONS = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
# With tied embeddings Megatron gives a last stage that has MTP's copy of the embedding
# an output layer of its own, which nothing uses: one process has none, and no gradient
# ever comes.
UNUSED = "unused."
MLA_OPTIONS = {
    "num_query_groups": None,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_head_dim": HEAD_SIZE,
    "qk_pos_emb_head_dim": ROPE_HEAD,
    "v_head_dim": HEAD_SIZE,
    "rope_type": "rope",
    "qk_layernorm": True,
}


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    tp_rank: int
    pp_rank: int
    dp_rank: int
    etp_rank: int
    ep_rank: int


def this_place() -> Place:
    from megatron.core import parallel_state as ps

    return Place(
        tp_rank=ps.get_tensor_model_parallel_rank(),
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        dp_rank=ps.get_data_parallel_rank(),
        etp_rank=ps.get_expert_tensor_parallel_rank(),
        ep_rank=ps.get_expert_model_parallel_rank(),
    )


# --- construction ---------------------------------------------------------------------


def initialize_parallel_state(topology: Topology) -> None:
    from megatron.core import parallel_state as ps

    ps.destroy_model_parallel()
    ps.initialize_model_parallel(
        topology.tp,
        topology.pp,
        virtual_pipeline_model_parallel_size=topology.chunks
        if topology.chunks > 1
        else None,
        context_parallel_size=topology.cp,
        expert_model_parallel_size=topology.ep,
        num_distributed_optimizer_instances=topology.instances,
        expert_tensor_parallel_size=topology.etp,
    )


def having(made: Any, **options: Any) -> dict[str, Any]:
    """The options that ``made``, a function or a dataclass, has in the installed
    version.
    """
    known = inspect.signature(made).parameters
    return {k: v for k, v in options.items() if k in known}


def transformer_config(case: Case, topology: Topology) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    options: dict[str, Any] = {
        "num_layers": case.layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": case.heads,
        "num_query_groups": case.groups,
        "attention_output_gate": case.output_gate,
        "ffn_hidden_size": case.ffn,
        "gated_linear_unit": case.gated,
        "activation_func": torch.nn.functional.silu
        if case.gated
        else torch.nn.functional.gelu,
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "virtual_pipeline_model_parallel_size": topology.chunks
        if topology.chunks > 1
        else None,
        "num_layers_in_first_pipeline_stage": topology.first_layers,
        "context_parallel_size": topology.cp,
        "sequence_parallel": topology.sequence_parallel,
        "pipeline_dtype": case.dtype,
        "params_dtype": case.dtype,
        "bf16": case.dtype == torch.bfloat16,
        "fp16": case.dtype == torch.float16,
        "add_bias_linear": case.expert_biases
        or not case.moe,  # shared experts have none
        "normalization": "RMSNorm" if case.rms_norm or case.mla else "LayerNorm",
        "hidden_dropout": case.dropout,
        "attention_dropout": case.dropout,
        "overlap_p2p_comm": topology.chunks > 1,
        "batch_p2p_comm": topology.chunks == 1,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "mtp_num_layers": 1 if case.mtp else None,
    }
    if case.moe:
        options |= _moe_options(case, topology)
    if case.recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        options |= {"recompute_num_layers": 1}
    if case.sinks:
        options |= {"softmax_type": "learnable"}
    if case.mixer == "mamba":
        options |= {**MAMBA, "is_hybrid_model": True, "add_bias_linear": False}
    if case.mixer == "delta":
        options |= {**DELTA, "experimental_attention_variant": "gated_delta_net"}
        options |= {
            "linear_attention_freq": [1] * case.layers,
            "add_bias_linear": False,
        }
    if case.fp8:
        options |= {"fp8": "e4m3", "fp8_recipe": case.fp8, "fp8_param": True}
    if case.qk_clip:
        threshold, alpha = case.qk_clip
        options |= {
            "qk_clip": True,
            "qk_clip_threshold": threshold,
            "qk_clip_alpha": alpha,
        }
    if not case.mla:
        return TransformerConfig(**having(TransformerConfig, **options))
    return MLATransformerConfig(**having(MLATransformerConfig, **options | MLA_OPTIONS))


def _moe_options(case: Case, topology: Topology) -> dict[str, Any]:
    return {
        "num_moe_experts": EXPERTS,
        "moe_layer_freq": [0] * case.dense_layers
        + [1] * (case.layers - case.dense_layers),
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": MOE_FFN,
        "moe_shared_expert_intermediate_size": SHARED_FFN if case.shared else None,
        "moe_aux_loss_coeff": 0.01,
        "moe_token_dispatcher_type": topology.dispatcher,
        "moe_grouped_gemm": bool(case.grouped),
        "moe_use_legacy_grouped_gemm": case.grouped == "legacy",
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.expert_tp,
    }


def layer_spec(case: Case, config: Any, chunk: dict[str, Any]) -> Any:
    """Megatron's modules. Where Transformer Engine's Python is at hand they are its
    own, else the local ones, with stand-ins for Transformer Engine's where the case has
    them.
    """
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )

    if takes_te(case):
        return _te_spec(case, config, chunk)
    if case.mixer == "delta":
        plain = get_gpt_layer_local_spec()
        plain.submodules.self_attention = gated_delta_spec(config)
        return plain
    if case.dense_layers:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, **chunk)
    options = {
        "num_experts": EXPERTS if case.moe else None,
        "moe_grouped_gemm": case.grouped == "legacy",
        "multi_latent_attention": bool(case.mla),
        "qk_layernorm": bool(case.mla),
    }
    if case.grouped == "legacy":
        options["moe_use_legacy_grouped_gemm"] = True
    if case.rms_norm:
        options["normalization"] = "RMSNorm"
    spec = get_gpt_layer_local_spec(**options)
    if case.mla == "duplicated":
        from support.models import te_standin

        attention = spec.submodules.self_attention.submodules
        attention.linear_q_down_proj = te_standin.TELinear
        attention.linear_kv_down_proj = te_standin.TELinear
    if case.grouped == "te":
        _take_te_experts(spec.submodules.mlp)
    return spec


def takes_te(case: Case) -> bool:
    """Whether the case's layers are Transformer Engine's own: they have all but two
    kinds.
    """
    return (
        te_on_cpu.TE is not None
        and not case.mixer
        and case.grouped != "legacy"
        and case.mla != "column"
    )


def _te_spec(case: Case, config: Any, chunk: dict[str, Any]) -> Any:
    """As a run with ``--transformer-impl transformer_engine`` takes it."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if case.dense_layers:
        return specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, **chunk
        )
    layer = specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=EXPERTS if case.moe else None,
        moe_grouped_gemm=case.grouped == "te",
        multi_latent_attention=bool(case.mla),
        qk_layernorm=bool(case.mla),
    )
    if not case.te_attention:
        layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    return layer


def _take_te_experts(moe: Any) -> None:
    from megatron.core.transformer.moe import experts

    from support.models import te_standin

    linears = {
        "linear_fc1": te_standin.TEColumnParallelGroupedLinear,
        "linear_fc2": te_standin.TERowParallelGroupedLinear,
    }
    if VERSION >= (0, 17):  # a ModuleSpec there, a partial in later ones
        layer = (
            moe.submodules if hasattr(moe, "submodules") else moe.keywords["submodules"]
        )
        submodules = experts.GroupedMLPSubmodules(**linears)
        layer.experts = partial(experts.TEGroupedMLP, submodules=submodules)
        return
    from megatron.core.transformer.mlp import MLPSubmodules

    moe.submodules.experts.module = experts.TEGroupedMLP
    moe.submodules.experts.submodules = MLPSubmodules(**linears)


@contextmanager
def _as_if_te_were_installed() -> Iterator[None]:
    """MLASelfAttention asks what is a TELinear, and makes down projections of it
    'duplicated'; without Transformer Engine that name is a mock, and core 0.12 does not
    ask.
    """
    from megatron.core.transformer import multi_latent_attention

    from support.models import te_standin

    with mock.patch.object(
        multi_latent_attention, "TELinear", te_standin.TELinear, create=True
    ):
        yield


def gpt(case: Case, config: Any, vp_stage: int | None) -> Any:
    """A model chunk: of this pipeline stage, or the given one of several chunks on
    it.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    if vp_stage is not None:
        # core 0.12 knows no other way
        ps.set_virtual_pipeline_model_parallel_rank(vp_stage)
    chunk = {} if VERSION < (0, 13) else {"vp_stage": vp_stage}
    spec = layer_spec(case, config, chunk)
    if case.latent_biases:
        attention = spec.submodules.self_attention.submodules
        for name in ("linear_q_up_proj", "linear_kv_up_proj"):
            setattr(attention, name, _biased(getattr(attention, name)))
    mtp = None
    if case.mtp:
        mtp = get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=takes_te(case), **chunk
        )
    options = {
        "vocab_size": case.vocab,
        "max_sequence_length": SEQUENCE,
        "pre_process": ps.is_pipeline_first_stage(ignore_virtual=False, **chunk),
        "post_process": ps.is_pipeline_last_stage(ignore_virtual=False, **chunk),
        "share_embeddings_and_output_weights": case.tied,
        "position_embedding_type": "rope",
    }
    if case.mixer == "mamba":
        name = (
            "hybrid_override_pattern" if VERSION < (0, 17) else "hybrid_layer_pattern"
        )
        return build_mamba({name: "M" * case.layers}, config, **options)
    standin = case.mla and te_on_cpu.TE is None
    with ExitStack() as stack:
        if standin:
            stack.enter_context(_as_if_te_were_installed())
        if case.mixer == "delta":
            stack.enter_context(without_fla())
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            mtp_block_spec=mtp,
            **options,
            **chunk,
        )


def _biased(linear: type) -> type:
    """The linear with a bias, whatever MLA asks for."""

    class Biased(linear):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"bias": True})

    return Biased


# --- names and parts ------------------------------------------------------------------


def global_names(model: Any, place: Place, topology: Topology) -> dict[str, str]:
    """Local name to the name in one process: layers count over all stages and chunks,
    experts over all expert-parallel ranks, and a tied copy has the name of its
    original.
    """
    first_layer = model.decoder.layers[0].layer_number - 1
    first_expert = place.ep_rank * (EXPERTS // topology.ep)
    names = {}
    for local, _ in model.named_parameters():
        name = local
        if local.startswith(LAYERS_PREFIX):
            number, rest = local.removeprefix(LAYERS_PREFIX).split(".", 1)
            name = f"{LAYERS_PREFIX}{int(number) + first_layer}.{rest}"
        elif (
            local == "output_layer.weight" and model.share_embeddings_and_output_weights
        ):
            name = UNUSED + local if hasattr(model, "embedding") else TIED
        names[local] = _global_expert(name, first_expert)
    return names


def _global_expert(name: str, first_expert: int) -> str:
    """``…local_experts.{i}.…`` and ``…experts.linear_fc1.weight{i}`` with the number
    over all.
    """
    before, mark, after = name.partition(".experts.local_experts.")
    if mark:
        number, rest = after.split(".", 1)
        return f"{before}{mark}{int(number) + first_expert}.{rest}"
    grouped = re.fullmatch(r"(.*\.experts\.linear_fc\d\.(?:weight|bias))(\d+)", name)
    if grouped:  # an adapter, without a number, is all experts'
        return f"{grouped[1]}{int(grouped[2]) + first_expert}"
    return name


def piece_of(
    name: str, param: torch.nn.Parameter, case: Case, place: Place, topology: Topology
) -> Piece:
    """What of the whole parameter this rank holds."""
    if name.endswith((".experts.weight1", ".experts.weight2")):
        return _batch_of_transposed(name, case, place, topology)
    dim = _split_dim(name, param, case)
    if dim is None:
        return Piece(tuple(param.shape))
    sections = (1, 1) if case.gated and ".linear_fc1." in name else (1,)
    if name.endswith("in_proj.weight"):
        sections = IN_PROJ[case.mixer]
    if ".conv1d" in name:  # of x, B, C, and of query, key, value
        sections = (
            IN_PROJ["mamba"][1:4] if case.mixer == "mamba" else IN_PROJ["delta"][:3]
        )
    cut = Cut(dim, place.tp_rank, topology.tp, sections)
    if ".mlp.experts." in name:
        cut = replace(cut, index=place.etp_rank, count=topology.expert_tp)
    return Piece(tuple(param.shape), (cut,))


def _split_dim(name: str, param: torch.nn.Parameter, case: Case) -> int | None:
    of_te = case.grouped == "te" or takes_te(case)
    if of_te and ".mlp.experts." in name and ".adapter." not in name:
        if ".linear_fc1." in name:
            return 0
        return 1 if param.dim() == 2 else None
    # Megatron has them column-parallel there
    cut_by_te = takes_te(case) and VERSION < (0, 13)
    if case.mla == "duplicated" and name.endswith(DOWN_PROJECTIONS) and not cut_by_te:
        return None
    if name.endswith((".softmax_offset", ".mixer.norm.weight")):
        return 0  # marked nowhere, or only by later cores
    if not getattr(param, "tensor_model_parallel", False):
        return None
    return int(getattr(param, "partition_dim", 0))  # Mamba mixers do not mark the dim


def _batch_of_transposed(
    name: str, case: Case, place: Place, topology: Topology
) -> Piece:
    """Megatron's legacy GroupedMLP: memory is [experts, in, out], whatever the
    parameter's shape says (megatron/core/transformer/moe/experts.py,
    GroupedMLP.forward).
    """
    experts, ffn = EXPERTS // topology.ep, MOE_FFN // topology.expert_tp
    over_experts = Cut(0, place.ep_rank, topology.ep)
    if name.endswith("weight1"):
        shape = (experts, HIDDEN, ffn * (2 if case.gated else 1))
        over_ffn = Cut(
            2, place.etp_rank, topology.expert_tp, (1, 1) if case.gated else (1,)
        )
    else:
        shape = (experts, ffn, HIDDEN)
        over_ffn = Cut(1, place.etp_rank, topology.expert_tp)
    return Piece(shape, (over_experts, over_ffn))
