"""From flags to the settings of Megatron's model and of the ranks, as Megatron-LM does.

Sources: ``validate_args`` and ``core_transformer_config_from_args`` of
megatron/training/arguments.py, and ``_vocab_size_with_padding`` of
megatron/training/tokenizer/tokenizer.py (since 0.17 of
megatron/core/tokenizers/utils/build_tokenizer.py), at core_v0.12.3 to core_v0.19.0 and main. They
agree but where it is said.
"""

from __future__ import annotations

import dataclasses
import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_muon.lab.dry_run.hybrid.settings import chunks as hybrid_chunks
from megatron_muon.lab.dry_run.hybrid.settings import is_hybrid
from megatron_muon.mcore.seams.rows import check_part, megatron_version

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
        ValueError, AssertionError: Megatron itself finds something wrong.
    """
    _require(flags, "num_layers", "hidden_size", "num_attention_heads")
    if flags.group_query_attention:
        _require_groups(flags.num_query_groups, ranks.tp)
    config_class = MLATransformerConfig if flags.multi_latent_attention else TransformerConfig
    options = {name: getattr(flags, name) for name in _fields() if hasattr(flags, name)}
    options |= _sizes(flags) | {
        "num_moe_experts": flags.num_experts or None,
        "num_query_groups": flags.num_query_groups if flags.group_query_attention else None,
        "sequence_parallel": flags.sequence_parallel and ranks.tp > 1,
        "expert_tensor_parallel_size": ranks.expert_tp,
        "virtual_pipeline_model_parallel_size": ranks.chunks,
        "num_layers_in_first_pipeline_stage": flags.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": flags.decoder_last_pipeline_num_layers,
        "gated_linear_unit": flags.swiglu or getattr(flags, "quick_geglu", False),
        "activation_func": torch.nn.functional.silu if flags.swiglu else torch.nn.functional.gelu,
        "params_dtype": _dtype(flags),
        "pipeline_dtype": _dtype(flags),
        "moe_grouped_gemm": has_grouped_weights(flags),
        "moe_token_dispatcher_type": "alltoall",  # no dispatcher has parameters; this one fits all
    }
    if "transformer_impl" in _fields():  # since 0.14; the layers are chosen in ``chunks``
        options["transformer_impl"] = "local"
    if flags.multi_latent_attention:
        options |= {name: getattr(flags, name) for name in _MLA}
    if is_hybrid(flags):
        options["is_hybrid_model"] = True
    return config_class(**options)


def validated(flags: Namespace, ranks: Ranks) -> Namespace:
    """The flags as a run has them once Megatron-LM has validated them and Muon is turned on.

    Raises:
        ValueError: a flag is missing, or is not possible here.
        SeamError: Megatron lacks what the model is built of; names it.
    """
    _require(flags, "num_layers", "hidden_size", "num_attention_heads")
    if is_hybrid(flags):
        check_part("hybrid")
    sizes = {
        "padded_vocab_size": padded_vocab(flags),
        "world_size": ranks.world,
        "expert_tensor_parallel_size": ranks.expert_tp,
        "virtual_pipeline_model_parallel_size": ranks.chunks,
    }
    layout = {"muon_dp_layout": flags.muon_dp_layout or "contiguous"}
    return Namespace(**{**vars(flags), **_sizes(flags), **sizes, **layout})


def _dtype(flags: Namespace) -> torch.dtype:
    """The dtype of the parameters."""
    if flags.fp16:
        return torch.float16
    return torch.bfloat16 if flags.bf16 else torch.float32


def padded_vocab(flags: Namespace) -> int:
    """Rows of the embedding over all TP ranks.

    Raises:
        ValueError: no size is given.
    """
    padded = getattr(flags, "padded_vocab_size", None)  # a flag since 0.14
    if padded is not None:
        return int(padded)
    if flags.vocab_size is None:
        raise ValueError(
            "give --padded-vocab-size, or --vocab-size where the script takes it from a tokenizer"
        )
    with_eod = ["NullMultimodalTokenizer"]  # a token that --vocab-size does not count
    if megatron_version()[1] < (0, 18):
        with_eod.append("NullTokenizer")
    size = flags.vocab_size + (flags.tokenizer_type in with_eod)
    if not getattr(flags, "pad_vocab_size", True):  # a flag since 0.18
        raise ValueError("--no-pad-vocab-size needs --padded-vocab-size: it is taken as it is")
    multiple = flags.make_vocab_size_divisible_by * flags.tensor_model_parallel_size
    return int(math.ceil(size / multiple) * multiple)


def has_grouped_weights(flags: Namespace) -> bool:
    """Whether all of a rank's experts are one parameter: Megatron's legacy GroupedMLP, up to 0.16.

    Later a local model has a linear for each expert, with --moe-grouped-gemm too.
    """
    if "moe_use_legacy_grouped_gemm" not in _fields() or is_hybrid(flags):
        return False
    legacy = flags.moe_use_legacy_grouped_gemm or flags.transformer_impl == "local"
    return bool(flags.moe_grouped_gemm and legacy)


def _fields() -> set[str]:
    return {field.name for field in dataclasses.fields(TransformerConfig)}


def _require_groups(groups: int, tp_size: int) -> None:
    """Megatron's own error names fields in place of flags, and not the versions that can."""
    name, version = megatron_version()
    shares = version >= (0, 16)  # a query group on several TP ranks
    if groups % tp_size == 0 or (shares and tp_size % groups == 0):
        return
    rule = "a multiple or a divisor of" if shares else "a multiple of"
    since = "" if shares else ": core 0.16 and later also take a divisor"
    raise ValueError(
        f"--num-query-groups ({groups}) must be {rule} --tensor-model-parallel-size ({tp_size}) "
        f"in megatron-core {name}{since}"
    )


def _require(flags: Namespace, *names: str) -> None:
    missing = [f"--{name.replace('_', '-')}" for name in names if not getattr(flags, name)]
    if missing:
        raise ValueError(f"{', '.join(missing)} needed")


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
    if is_hybrid(flags):
        return hybrid_chunks(flags)
    pp = flags.pipeline_model_parallel_size
    layout = getattr(flags, "pipeline_model_parallel_layout", None)  # a flag since 0.13
    each, count = flags.num_layers_per_virtual_pipeline_stage, None
    if layout is not None:
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )

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
