"""From flags to the settings of Megatron's GPT and of the ranks, as Megatron-LM derives
them.

Sources: ``validate_args`` and ``core_transformer_config_from_args`` of
megatron/training/arguments.py, and ``_vocab_size_with_padding`` of
megatron/training/tokenizer/tokenizer.py.
"""

from __future__ import annotations

import dataclasses
import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

_MLA = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)
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
    """The division of the ranks, of the smallest world if none is given; a ValueError
    if uneven.
    """
    tp, pp = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
    cp, ep = flags.context_parallel_size, flags.expert_model_parallel_size
    expert_tp = flags.expert_tensor_parallel_size or tp
    instances = flags.num_distributed_optimizer_instances
    dense, experts = tp * cp * pp, expert_tp * ep * pp
    world = math.lcm(dense, experts) if flags.world_size is None else flags.world_size
    for what, size, shards in (
        ("TP x CP x PP", dense, world // (tp * pp)),
        ("expert-TP x EP x PP", experts, world // experts),
    ):
        if world < 1 or world % size:
            raise ValueError(
                f"--world-size {world} is not a multiple of {what} = {size}"
            )
        if shards % instances:
            raise ValueError(
                f"--num-distributed-optimizer-instances {instances} does not divide "
                f"the {shards} shards of a buffer on {world} ranks with {what} = {size}"
            )
    order = _ORDER_PP_INSIDE if flags.use_tp_pp_dp_mapping else _ORDER
    return Ranks(world, tp, pp, cp, ep, expert_tp, _chunks(flags), instances, order)


def transformer_config(flags: Namespace, ranks: Ranks) -> Any:
    """Megatron's TransformerConfig, or MLATransformerConfig, and its own errors."""
    sizes = _sizes(flags)
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


def validated(flags: Namespace, ranks: Ranks) -> Namespace:
    """The flags once Megatron-LM has validated them and Muon is on, or a ValueError."""
    sizes = _sizes(flags) | {
        "padded_vocab_size": padded_vocab(flags),
        "world_size": ranks.world,
        "expert_tensor_parallel_size": ranks.expert_tp,
        "virtual_pipeline_model_parallel_size": ranks.chunks,
    }
    others = {
        "moe_grouped_gemm": False,
        "muon_dp_layout": flags.muon_dp_layout or "contiguous",
    }
    return Namespace(**{**vars(flags), **sizes, **others})


def padded_vocab(flags: Namespace) -> int:
    """Rows of the embedding over all TP ranks; a ValueError if no size is given."""
    if flags.padded_vocab_size is not None:
        return int(flags.padded_vocab_size)
    _require(flags, "vocab_size")
    multiple = flags.make_vocab_size_divisible_by * flags.tensor_model_parallel_size
    return int(math.ceil(flags.vocab_size / multiple) * multiple)


def _require(flags: Namespace, *names: str) -> None:
    missing = [
        f"--{name.replace('_', '-')}" for name in names if not getattr(flags, name)
    ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} needed: give the run's script and its arguments, a "
            "preset by --model, or a GPT's sizes"
        )


def _sizes(flags: Namespace) -> dict[str, int | None]:
    """Sizes that Megatron-LM derives where they are not given."""
    _require(flags, "num_layers", "hidden_size", "num_attention_heads")
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
    # Megatron-LM has validated them
    if hasattr(flags, "virtual_pipeline_model_parallel_size"):
        return flags.virtual_pipeline_model_parallel_size or None
    count = flags.num_virtual_stages_per_pipeline_rank
    return None if count == 1 else count
