"""A byte-level GPT from megatron-core, with initial weights that do not depend on the
topology.
"""

from __future__ import annotations

import hashlib
import math
from argparse import Namespace

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module

VOCAB_SIZE = (
    256  # bytes; even for every usual TP, so no padding and the same loss for any TP
)
LATENT_SIZES = (
    *(
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
    ),
)
# Megatron's scaled_init_method
SCALED_BY_DEPTH = ("linear_proj.weight", "linear_fc2.weight")


def model_config(args: Namespace) -> TransformerConfig:
    """megatron-core's configuration for these flags, fusions that need CUDA kernels
    off.
    """
    kind, latent = TransformerConfig, {}
    if args.multi_latent_attention:
        kind = MLATransformerConfig
        latent = {name: getattr(args, name) for name in LATENT_SIZES} | {
            "rope_type": "rope"
        }
    return kind(
        **latent,
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        normalization="RMSNorm",
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu
        if args.swiglu
        else torch.nn.functional.gelu,
        add_bias_linear=not args.disable_bias_linear,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        **({"log_max_attention_logit": True} if args.log_max_attention_logit else {}),
        **(_experts(args) if args.num_experts else {}),
        **(_by_width(args) if args.use_mup else {}),
    )


def _by_width(args: Namespace) -> dict[str, object]:
    return {"use_mup": True, "mup_base_hidden_size": args.mup_base_hidden_size}


def _experts(args: Namespace) -> dict[str, object]:
    return {
        "num_moe_experts": args.num_experts,
        "moe_router_topk": args.moe_router_topk,
        "moe_ffn_hidden_size": args.moe_ffn_hidden_size or args.ffn_hidden_size,
        "moe_aux_loss_coeff": args.moe_aux_loss_coeff,
        "moe_token_dispatcher_type": "alltoall",
    }


def build_model(args: Namespace) -> DistributedDataParallel:
    """This rank's part of the GPT, in Megatron's DDP, with its initial weights."""
    config = model_config(args)
    shares_embeddings = not args.untie_embeddings_and_output_weights
    gpt: torch.nn.Module = GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=args.num_experts,
            normalization="RMSNorm",
            multi_latent_attention=args.multi_latent_attention,
        ),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shares_embeddings,
        position_embedding_type="rope",
    )
    set_initial_weights(gpt, args.seed, args.init_method_std)
    if args.bf16:
        gpt = Float16Module(config, gpt)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,  # as Megatron's --bf16 does
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    return DistributedDataParallel(config, ddp_config, gpt)


@torch.no_grad()
def set_initial_weights(gpt: GPTModel, seed: int, std: float) -> None:
    """Draws each whole (TP = 1) matrix from its own generator and keeps this rank's
    slice.

    The generator is seeded by ``seed`` and the parameter's name with its layer's number
    in the whole model, so any TP, PP and DP start from the same weights.
    """
    depth_scale = 1 / math.sqrt(2 * gpt.config.num_layers)
    width_scale = 1 / math.sqrt(getattr(gpt.config, "mup_width_mult", 1.0))
    for name, param in gpt.named_parameters():
        if name.endswith("bias"):
            param.zero_()
        elif param.dim() == 1:  # RMSNorm's gamma
            param.fill_(1.0)
        else:
            scale = std * (depth_scale if name.endswith(SCALED_BY_DEPTH) else 1.0)
            scale *= width_scale if name.startswith("decoder.") else 1.0
            whole = _draw(_global_name(gpt, name), _whole_shape(param), seed) * scale
            param.copy_(
                _my_slice(whole, param, gpt.config.gated_linear_unit and "fc1" in name)
            )


def _global_name(gpt: GPTModel, name: str) -> str:
    """``decoder.layers.0.x`` on a later pipeline stage becomes ``decoder.layers.2.x``.

    A tied output layer takes the embedding's name: it is a copy of the same matrix.
    """
    if name == "output_layer.weight" and gpt.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(gpt.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)


def _whole_shape(param: torch.nn.Parameter) -> list[int]:
    shape = list(param.shape)
    if getattr(param, "tensor_model_parallel", False):
        shape[param.partition_dim] *= (
            parallel_state.get_tensor_model_parallel_world_size()
        )
    return shape


def _draw(name: str, shape: list[int], seed: int) -> torch.Tensor:
    """fp32 standard normals that depend on (seed, name, shape) alone."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(shape, generator=generator)


def _my_slice(
    whole: torch.Tensor, param: torch.nn.Parameter, gated: bool
) -> torch.Tensor:
    """This TP rank's part. A gated fc1 is gate over up, and each half is cut over
    TP.
    """
    if not getattr(param, "tensor_model_parallel", False):
        return whole
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    halves = whole.chunk(2) if gated else (whole,)
    return torch.cat([half.chunk(size, param.partition_dim)[rank] for half in halves])
