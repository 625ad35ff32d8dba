"""From flags to the settings of Megatron's model, of its DDP and of the ranks, as Megatron-LM does.

Sources, at core_v0.16.1: ``validate_args`` and ``core_transformer_config_from_args``
(megatron/training/arguments.py), ``get_model`` (megatron/training/training.py), gpt_builders.py,
``_vocab_size_with_padding`` (megatron/training/tokenizer/tokenizer.py).
"""

from __future__ import annotations

import dataclasses
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

_MLA = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_ORDER, _ORDER_PP_INSIDE = "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the ranks of a run are divided; ``initialize_model_parallel``'s arguments."""

    world: int
    tp: int
    pp: int
    cp: int
    ep: int
    expert_tp: int
    chunks: int | None
    instances: int
    order: str


def ranks_of(flags: Namespace) -> Ranks:
    """The division, of the smallest world that it fits where no size is given.

    Raises:
        ValueError: it does not come out even.
    """
    tp, pp = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
    cp, ep = flags.context_parallel_size, flags.expert_model_parallel_size
    expert_tp = flags.expert_tensor_parallel_size or tp
    instances = flags.num_distributed_optimizer_instances
    for name, size in {
        "--tensor-model-parallel-size": tp,
        "--pipeline-model-parallel-size": pp,
        "--context-parallel-size": cp,
        "--expert-model-parallel-size": ep,
        "--expert-tensor-parallel-size": expert_tp,
        "--num-distributed-optimizer-instances": instances,
    }.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    dense, experts = tp * cp * pp, expert_tp * ep * pp
    world = math.lcm(dense, experts) if flags.world_size is None else flags.world_size
    for what, size, shards in (
        ("TP x CP x PP", dense, world // (tp * pp)),
        ("expert-TP x EP x PP", experts, world // experts),
    ):
        if world < 1 or world % size:
            raise ValueError(f"--world-size {world} is not a multiple of {what} = {size}")
        if shards % instances:
            raise ValueError(
                f"--num-distributed-optimizer-instances {instances} does not divide the {shards} "
                f"shards of a buffer on {world} ranks with {what} = {size}"
            )
    order = _ORDER_PP_INSIDE if flags.use_tp_pp_dp_mapping else _ORDER
    return Ranks(world, tp, pp, cp, ep, expert_tp, _chunks(flags), instances, order)


def transformer_config(flags: Namespace, ranks: Ranks) -> Any:
    """Megatron's TransformerConfig, or MLATransformerConfig.

    Raises:
        ValueError, AssertionError: what Megatron itself finds wrong.
    """
    _require(flags, "num_layers", "hidden_size", "num_attention_heads")
    config_class = MLATransformerConfig if flags.multi_latent_attention else TransformerConfig
    options = {
        field.name: getattr(flags, field.name)
        for field in dataclasses.fields(TransformerConfig)
        if hasattr(flags, field.name)
    }
    options |= _sizes(flags) | {
        "num_moe_experts": flags.num_experts or None,
        "num_query_groups": flags.num_query_groups if flags.group_query_attention else None,
        "sequence_parallel": flags.sequence_parallel and ranks.tp > 1,
        "expert_tensor_parallel_size": ranks.expert_tp,
        "virtual_pipeline_model_parallel_size": ranks.chunks,
        "num_layers_in_first_pipeline_stage": flags.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": flags.decoder_last_pipeline_num_layers,
        "gated_linear_unit": flags.swiglu or flags.quick_geglu,
        "activation_func": torch.nn.functional.silu if flags.swiglu else torch.nn.functional.gelu,
        "params_dtype": _dtype(flags),
        "pipeline_dtype": _dtype(flags),
        "moe_grouped_gemm": has_grouped_weights(flags),
        "moe_token_dispatcher_type": "alltoall",  # no dispatcher has parameters; this one fits all
        "transformer_impl": "local",
    }
    if flags.multi_latent_attention:
        options |= {name: getattr(flags, name) for name in _MLA}
    return config_class(**options)


def padded_vocab(flags: Namespace) -> int:
    """Rows of the embedding over all TP ranks.

    Raises:
        ValueError: no size is given.
    """
    if flags.padded_vocab_size is not None:
        return int(flags.padded_vocab_size)
    if flags.vocab_size is None:
        raise ValueError(
            "give --padded-vocab-size, or --vocab-size where the script takes it from a tokenizer"
        )
    size = flags.vocab_size + (flags.tokenizer_type in ("NullTokenizer", "NullMultimodalTokenizer"))
    multiple = flags.make_vocab_size_divisible_by * flags.tensor_model_parallel_size
    return int(math.ceil(size / multiple) * multiple)


def has_grouped_weights(flags: Namespace) -> bool:
    """Whether all of a rank's experts are one parameter: Megatron's legacy GroupedMLP."""
    legacy = flags.moe_use_legacy_grouped_gemm or flags.transformer_impl == "local"
    return bool(flags.moe_grouped_gemm and legacy)


def build_chunks(flags: Namespace, config: Any) -> list[Any]:
    """This rank's model chunks in their DDP, on whatever device new parameters come."""
    chunks = config.virtual_pipeline_model_parallel_size
    stages: Sequence[int | None] = range(chunks) if chunks else [None]
    models = [_gpt(flags, config, vp_stage) for vp_stage in stages]
    for model in models:
        for param in model.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    ddp_config = _ddp_config(flags, sum(p.nelement() for m in models for p in m.parameters()))
    return [
        DistributedDataParallel(
            config,
            ddp_config,
            Float16Module(config, model) if flags.fp16 or flags.bf16 else model,
            disable_bucketing=index > 0 or flags.overlap_param_gather_with_optimizer_step,
        )
        for index, model in enumerate(models)
    ]


def optimizer_config(flags: Namespace) -> Any:
    """What ``refuse_unsupported`` looks at. Set after the construction, which asks for a GPU."""
    config = OptimizerConfig(
        optimizer="adam", bf16=flags.bf16, fp16=flags.fp16, use_distributed_optimizer=True
    )
    for name in (
        "use_precision_aware_optimizer",
        "optimizer_cpu_offload",
        "optimizer_cuda_graph",
        "overlap_param_gather_with_optimizer_step",
    ):
        setattr(config, name, getattr(flags, name))
    return config


def _require(flags: Namespace, *names: str) -> None:
    missing = [f"--{name.replace('_', '-')}" for name in names if not getattr(flags, name)]
    if missing:
        raise ValueError(f"{', '.join(missing)} needed")


def _dtype(flags: Namespace) -> torch.dtype:
    if flags.fp16:
        return torch.float16
    return torch.bfloat16 if flags.bf16 else torch.float32


def _sizes(flags: Namespace) -> dict[str, int | None]:
    """Sizes that Megatron-LM derives where they are not given."""
    hidden, heads = flags.hidden_size, flags.num_attention_heads
    if flags.kv_channels is None and hidden % heads:
        raise ValueError(f"--hidden-size {hidden} is not a multiple of {heads} heads")
    wide = int((4 * hidden * 2 / 3) / 64) * 64 if flags.swiglu else 4 * hidden
    ffn = flags.ffn_hidden_size or wide
    experts_ffn = (flags.moe_ffn_hidden_size or ffn) if flags.num_experts else None
    return {
        "kv_channels": flags.kv_channels or hidden // heads,
        "ffn_hidden_size": ffn,
        "moe_ffn_hidden_size": experts_ffn,
    }


def _chunks(flags: Namespace) -> int | None:
    """Model chunks of a rank, None for one."""
    pp = flags.pipeline_model_parallel_size
    layout = flags.pipeline_model_parallel_layout
    each, count = flags.num_layers_per_virtual_pipeline_stage, None
    if layout is not None:
        count, rest = divmod(PipelineParallelLayerLayout.get_num_stages_from_str(layout), pp)
        if rest:
            raise ValueError(f"--pipeline-model-parallel-layout {layout!r} is not for {pp} stages")
    elif flags.num_virtual_stages_per_pipeline_rank is not None:
        count = flags.num_virtual_stages_per_pipeline_rank
    elif each is not None:
        _require(flags, "num_layers")
        layers = flags.num_layers + sum(
            (
                flags.account_for_embedding_in_pipeline_split,
                flags.account_for_loss_in_pipeline_split,
            )
        )
        if each < 1 or layers % (pp * each):
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {each} does not divide {layers} layers "
                f"over {pp} stages"
            )
        count = layers // (pp * each)
    return None if count == 1 else count


def _gpt(flags: Namespace, config: Any, vp_stage: int | None) -> Any:
    spec = _layer_spec(flags, config, vp_stage)
    kind = "rope" if flags.use_rotary_position_embeddings else flags.position_embedding_type
    positions = flags.max_position_embeddings or flags.seq_length
    if flags.no_position_embedding and kind != "rope":
        raise ValueError("--no-position-embedding needs --position-embedding-type rope")
    if kind == "learned_absolute" and not positions:
        raise ValueError("--max-position-embeddings needed for learned_absolute embeddings")
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab(flags),
        max_sequence_length=positions or 1,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=not flags.untie_embeddings_and_output_weights,
        position_embedding_type=kind,
        mtp_block_spec=_mtp_spec(flags, config, vp_stage),
        vp_stage=vp_stage,
    )


def _layer_spec(flags: Namespace, config: Any, vp_stage: int | None) -> Any:
    if flags.num_experts:
        return get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            vp_stage=vp_stage,
        )
    return get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )


def _mtp_spec(flags: Namespace, config: Any, vp_stage: int | None) -> Any:
    if flags.mtp_num_layers is None:
        return None
    layers = get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return get_gpt_mtp_block_spec(
        config, layers[-1], use_transformer_engine=False, vp_stage=vp_stage
    )


def _ddp_config(flags: Namespace, parameters: int) -> Any:
    """``get_model``'s.

    Args:
        parameters: elements in all chunks of this rank.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not flags.grad_reduce_in_bf16
        if flags.bf16
        else flags.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=flags.overlap_grad_reduce,
        overlap_param_gather=flags.overlap_param_gather,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=flags.num_distributed_optimizer_instances,
        bucket_size=flags.ddp_bucket_size,
        pad_buckets_for_high_nccl_busbw=flags.ddp_pad_buckets_for_high_nccl_busbw,
        fp8_param_gather=flags.fp8_param_gather,
        use_megatron_fsdp=flags.use_megatron_fsdp,
    )
    if flags.ddp_num_buckets is not None:
        config.bucket_size = parameters // flags.ddp_num_buckets
    if config.bucket_size is None:
        with_cp = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        config.bucket_size = max(40_000_000, 1_000_000 * with_cp)
    if not config.overlap_grad_reduce:
        config.bucket_size = None
    return config
