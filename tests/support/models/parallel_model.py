"""A tiny GPT for every parallelism: its size, its layout over ranks, and weights by name."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from support import te_on_cpu

VOCABULARY, LENGTH, HIDDEN, HEADS, GROUPS, FFN, EXPERTS = 64, 16, 32, 4, 2, 64, 4
SEQUENCES = 2  # in a micro-batch


@dataclass(frozen=True)
class Model:
    """What is computed; the topology may not change it."""

    layers: int = 2
    moe: bool = False
    grouped: bool = False
    shared: bool = False
    mla: bool = False
    mtp: bool = False
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    dropout: float = 0.0
    loss_scale: float = 2.0**16
    steps: int = 3
    optimizer: str = "adam"
    clip: float = 1.0

    def __str__(self) -> str:
        flags = ("moe", "grouped", "shared", "mla", "mtp", "recompute")
        return "-".join(flag for flag in flags if getattr(self, flag)) or "dense"


@dataclass(frozen=True)
class Topology:
    """How it is laid out over ranks, and what overlaps."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    instances: int = 1
    dispatcher: str = "allgather"
    overlap: bool = False
    with_step: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        sizes = ("tp", "pp", "cp", "dp", "ep", "etp", "vpp", "instances")
        found = [f"{name}{getattr(self, name)}" for name in sizes if getattr(self, name) > 1]
        found += ["overlap"] * self.overlap + ["with-step"] * self.with_step
        return "-".join(found + [self.dispatcher] * (self.dispatcher != "allgather"))


# ---------------------------------------------------------------- building, on each rank


def make_config(m: Model, t: Topology) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    options: dict[str, Any] = {}
    if m.moe:
        options |= {
            "num_moe_experts": EXPERTS,
            "moe_ffn_hidden_size": FFN,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 0.01,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_token_dispatcher_type": t.dispatcher,
            "moe_grouped_gemm": m.grouped,
            "moe_shared_expert_intermediate_size": FFN if m.shared else None,
            "expert_model_parallel_size": t.ep,
            "expert_tensor_parallel_size": t.etp,
        }
    if m.mla:
        options |= {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 8,
            "rope_type": "rope",
        }
    if m.recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        options |= {"recompute_num_layers": 1}
    if t.vpp > 1:
        options |= {"virtual_pipeline_model_parallel_size": t.vpp}
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return (MLATransformerConfig if m.mla else TransformerConfig)(
        num_layers=m.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=None if m.mla else GROUPS,
        ffn_hidden_size=FFN,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        bf16=m.dtype is torch.bfloat16,
        fp16=m.dtype is torch.float16,
        params_dtype=m.dtype,
        pipeline_dtype=m.dtype,
        tensor_model_parallel_size=t.tp,
        pipeline_model_parallel_size=t.pp,
        context_parallel_size=t.cp,
        sequence_parallel=t.tp > 1,
        mtp_num_layers=1 if m.mtp else None,
        attention_dropout=m.dropout,
        hidden_dropout=m.dropout,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **options,
    )


def make_gpt(m: Model, t: Topology, config: Any, chunk: int) -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    stage = chunk if t.vpp > 1 else None
    layer = _layer(m)
    mtp = None
    if m.mtp:
        te = te_on_cpu.TE is not None
        mtp = specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=te, vp_stage=stage)
    return GPTModel(
        config,
        layer,
        VOCABULARY,
        LENGTH,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        vp_stage=stage,
    )


def _layer(m: Model) -> Any:
    """Of Transformer Engine's own modules where its Python is at hand, but for the attention."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    options = {
        "num_experts": EXPERTS if m.moe else None,
        "moe_grouped_gemm": m.grouped,
        "multi_latent_attention": m.mla,
    }
    if te_on_cpu.TE is None:
        return specs.get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    layer = specs.get_gpt_layer_with_transformer_engine_spec(**options)
    layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    return layer


@dataclass(frozen=True)
class Piece:
    """A rank's slice of one tensor of the one-process model: how to find it in its parameter."""

    name: str  # of the one-process model with SequentialMLP experts
    parameter: str  # this rank's name
    dim: int | None  # cut along this dimension over ``size`` ranks
    rank: int
    size: int
    expert: int | None = None  # which matrix of a GroupedMLP parameter with ``experts`` of them
    experts: int = 1

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The slice in the parameter or in something of its shape."""
        if self.expert is None:
            return tensor
        # the parameter's own shape is [hidden, experts × ffn] or the reverse; it is used as below
        shape = (HIDDEN, -1) if self.name.endswith("fc1.weight") else (-1, HIDDEN)
        return tensor.view(self.experts, *shape)[self.expert].t()

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the whole tensor."""
        if self.dim is None:
            return full
        halves = full.chunk(2) if "fc1" in self.name else (full,)  # gate and up are cut apart
        return torch.cat([half.chunk(self.size, self.dim)[self.rank] for half in halves])


def pieces(gpt: Any, t: Topology) -> Iterator[Piece]:
    from megatron.core import parallel_state as ps

    count = EXPERTS // t.ep
    first = count * ps.get_expert_model_parallel_rank()
    numbers = [layer.layer_number - 1 for layer in getattr(gpt.decoder, "layers", [])]
    for local, param in gpt.named_parameters():
        name = local
        if name.startswith("decoder.layers."):
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            name = f"decoder.layers.{numbers[int(number)]}.{rest}"
        dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
        rank, size = ps.get_tensor_model_parallel_rank(), t.tp
        if te_on_cpu.TE is not None and name.endswith("_down_proj.weight"):
            dim = None  # duplicated, whatever it is marked as
        if ".experts." in name:
            rank, size = ps.get_expert_tensor_parallel_rank(), t.etp
        head, _, tail = name.partition(".experts.")
        if tail.startswith("local_experts."):
            number, rest = tail.removeprefix("local_experts.").split(".", 1)
            name = f"{head}.experts.{int(number) + first}.{rest}"
            # experts are not marked as tensor-parallel
            dim = (0 if "fc1" in rest else 1) if size > 1 else None
        elif tail.startswith("linear_fc"):  # Transformer Engine's grouped linear
            layer, _, number = tail.partition(".weight")
            name = f"{head}.experts.{int(number) + first}.{layer}.weight"
            dim = (0 if "fc1" in layer else 1) if size > 1 else None
        elif tail:
            number, dim = (1, 0) if tail == "weight1" else (2, 1)
            for e in range(count):
                whole = f"{head}.experts.{e + first}.linear_fc{number}.weight"
                yield Piece(whole, local, dim, rank, size, e, count)
            continue
        yield Piece(name, local, dim, rank, size)


def set_weights(gpt: Any, t: Topology) -> None:
    """Every rank cuts its slice from a full tensor that depends on the parameter's name only."""
    params = dict(gpt.named_parameters())
    for piece in pieces(gpt, t):
        view = piece.view(params[piece.parameter].data)
        shape = list(view.shape)
        if piece.dim is not None:
            shape[piece.dim] *= piece.size
        g = torch.Generator().manual_seed(zlib.crc32(piece.name.encode()))
        full = torch.randn(shape, generator=g) * (0.1 if len(shape) > 1 else 0.3)
        full += 1.0 if len(shape) == 1 else 0.0  # norms around 1
        view.copy_(piece.cut(full))
