"""A GPT's chunks of Megatron's local modules in their DDP, as Megatron-LM builds them.

Sources: ``core_transformer_config_from_args`` (megatron/training/arguments.py),
``get_model`` (megatron/training/training.py) and gpt_builders.py, which is part of
pretrain_gpt.py before 0.15.
"""

from __future__ import annotations

import dataclasses
import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import (
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_muon.lab.dry_run.model import Ranks, model_sizes, padded_vocab

_MLA = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)


def build_chunks(
    flags: Namespace,
    config: Any,
    *,
    distributed_optimizer: bool = True,
    device: torch.device | None = None,
    layouts: Callable[[Sequence[Any], Any], Sequence[dict[str, Any]]] | None = None,
) -> list[Any]:
    """This rank's model chunks in their DDP, moved to a ``device``, if one is given.

    Without the ``distributed_optimizer`` gradients are all-reduced. ``layouts`` makes
    further arguments of each chunk's DDP, of the chunks and Megatron's
    DistributedDataParallelConfig.
    """
    chunks = config.virtual_pipeline_model_parallel_size
    stages: Sequence[int | None] = range(chunks) if chunks else [None]
    models = [_model(flags, config, vp_stage) for vp_stage in stages]
    elements = 0
    for model in models:
        if device is not None:
            model.to(device)
        for param in model.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(param)
            elements += param.nelement()
    ddp_config = _ddp_config(flags, elements)
    ddp_config.use_distributed_optimizer = distributed_optimizer
    if flags.fp16 or flags.bf16:
        models = [Float16Module(config, model) for model in models]
    further = [{} for _ in models] if layouts is None else layouts(models, ddp_config)
    return [
        DistributedDataParallel(
            config,
            ddp_config,
            model,
            disable_bucketing=index > 0
            or flags.overlap_param_gather_with_optimizer_step,
            **options,
        )
        for index, (model, options) in enumerate(zip(models, further, strict=True))
    ]


def transformer_config(flags: Namespace, ranks: Ranks) -> Any:
    """Megatron's TransformerConfig, or MLATransformerConfig, and its own errors."""
    sizes = model_sizes(flags)
    config_class = (
        MLATransformerConfig if flags.multi_latent_attention else TransformerConfig
    )
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    fields |= set(_MLA) if flags.multi_latent_attention else set()
    dtype = torch.float32
    if flags.fp16:
        dtype = torch.float16
    elif flags.bf16:
        dtype = torch.bfloat16
    options = {name: getattr(flags, name) for name in fields if hasattr(flags, name)}
    options |= sizes | {
        "num_moe_experts": flags.num_experts or None,
        "moe_shared_expert_intermediate_size": flags.moe_shared_expert_intermediate_size
        or None,
        "num_query_groups": flags.num_query_groups
        if flags.group_query_attention
        else None,
        "sequence_parallel": flags.sequence_parallel and ranks.tp > 1,
        "expert_tensor_parallel_size": ranks.expert_tp,
        "virtual_pipeline_model_parallel_size": ranks.chunks,
        "num_layers_in_first_pipeline_stage": flags.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": flags.decoder_last_pipeline_num_layers,
        "gated_linear_unit": flags.swiglu,
        "activation_func": torch.nn.functional.silu
        if flags.swiglu
        else torch.nn.functional.gelu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # no dispatcher has parameters; this one fits all
        "moe_token_dispatcher_type": "alltoall",
    }
    return config_class(**options)


def _model(flags: Namespace, config: Any, vp_stage: int | None) -> Any:
    chunk = _named_chunk(vp_stage)
    learned = flags.position_embedding_type == "learned_absolute"
    positions = flags.max_position_embeddings or flags.seq_length
    if learned and not positions:
        raise ValueError(
            "--max-position-embeddings needed for learned_absolute embeddings"
        )
    shares_embeddings = not flags.untie_embeddings_and_output_weights
    return GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(config, chunk),
        vocab_size=padded_vocab(flags),
        max_sequence_length=positions or 1,
        pre_process=parallel_state.is_pipeline_first_stage(
            ignore_virtual=False, **chunk
        ),
        post_process=parallel_state.is_pipeline_last_stage(
            ignore_virtual=False, **chunk
        ),
        share_embeddings_and_output_weights=shares_embeddings,
        position_embedding_type=flags.position_embedding_type,
        **chunk,
    )


def _named_chunk(vp_stage: int | None) -> dict[str, int | None]:
    """The keyword for which chunk is built; before 0.13 there is none, but Megatron's
    own state.
    """
    if "vp_stage" in inspect.signature(GPTModel).parameters:
        return {"vp_stage": vp_stage}
    if vp_stage is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
    return {}


def _layer_spec(config: Any, chunk: dict[str, int | None]) -> Any:
    if config.num_moe_experts:
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=config.normalization,
            **chunk,
        )
    return gpt_layer_specs.get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )


def _ddp_config(flags: Namespace, parameters: int) -> Any:
    """``get_model``'s, for as many parameters in all chunks of this rank."""
    of_fp16 = flags.accumulate_allreduce_grads_in_fp32
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not flags.grad_reduce_in_bf16 if flags.bf16 else of_fp16,
        overlap_grad_reduce=flags.overlap_grad_reduce,
        overlap_param_gather=flags.overlap_param_gather,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=flags.num_distributed_optimizer_instances,
        bucket_size=flags.ddp_bucket_size,
        pad_buckets_for_high_nccl_busbw=flags.ddp_pad_buckets_for_high_nccl_busbw,
    )
    if flags.ddp_num_buckets is not None:
        config.bucket_size = parameters // flags.ddp_num_buckets
    if config.bucket_size is None:
        with_cp = parallel_state.get_data_parallel_world_size(
            with_context_parallel=True
        )
        config.bucket_size = max(40_000_000, 1_000_000 * with_cp)
    if not config.overlap_grad_reduce:
        config.bucket_size = None
    return config
