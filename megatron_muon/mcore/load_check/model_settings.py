"""Settings of a model that change the function it computes, though its weights keep their shapes.

They go into a checkpoint's digest. They come from the model's own configuration, so they are known
with every Megatron and in one's own script, too. Only settings in force are recorded: rotary ones
if there are rotary embeddings, a router's if there are experts. The digest leaves out how the
function is computed (parallelism, precision, fusions, recomputation) or trained (dropout, losses of
a router). It leaves out most sizes, which shapes tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from megatron.core.utils import get_model_config

Settings = dict[str, Any]

SETTINGS_WAY_OUT = (
    "Start this run with the checkpoint's values. If the change is meant, as that of rotary "
    "settings for a longer context is: --no-muon-checkpoint-digest (checkpoint_digest=False in "
    "MuonConfig) loads it all without this check, until the first save; --finetune or "
    "--no-load-optim loads the weights and warns"
)

_ALWAYS = (
    *("num_layers", "hidden_size", "num_attention_heads", "softmax_scale", "softmax_type"),
    *("window_size", "qk_layernorm", "qk_l2_norm", "attention_output_gate", "no_rope_freq"),
    *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma"),
    *("apply_residual_connection_post_layernorm", "add_bias_linear", "add_qkv_bias"),
    *("activation_func", "gated_linear_unit", "activation_func_clamp_value", "num_moe_experts"),
    *("multi_latent_attention", "experimental_attention_variant", "linear_attention_freq"),
    *("enable_mhc_connections", "mtp_num_layers", "mtp_use_repeated_layer"),
)
_GROUPED_QUERIES = ("num_query_groups", "kv_channels")
_LATENT = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rope_type", "rotary_base", "rotary_percent"),
)
_LATENT_YARN = (
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim"),
)
_EXPERTS = (
    *("moe_layer_freq", "moe_router_topk", "moe_router_pre_softmax", "moe_router_score_function"),
    *("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_enable_expert_bias", "moe_apply_probs_on_input", "moe_shared_expert_gate"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size"),
)
_MAMBA = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")
_DELTA = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
_SPARSE = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
_ROTARY = {"rope", "mrope", "yarn"}  # kinds of position embedding
_FREQUENCIES = "rotary_frequencies"  # their number, the second and the last one
_TOLERANCE = {_FREQUENCIES: 1e-3}  # computed in fp32 on a device; other values come from settings


def settings_of(model_chunks: Sequence[Any]) -> Settings:
    """A model's settings by name, the same on all its ranks; empty on a rank without a chunk.

    Args:
        model_chunks: this rank's model chunks, wrapped or not.
    """
    if not model_chunks:
        return {}
    settings = {
        name: plain
        for name, value in _in_force(get_model_config(model_chunks[0]), _inner(model_chunks[0]))
        if (plain := _plain(value)) is not _NOT_PLAIN
    }
    return dict(sorted(settings.items()))


def changed_settings(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """A phrase for each setting that both models have and that differs: its name and both values.

    Args:
        saved: ``settings_of`` the model that was saved, from a digest.
        own: ``settings_of`` the model that is to be loaded.
    """
    names = [
        name
        for name in sorted(saved.keys() & own.keys())
        if not _same(saved[name], own[name], _TOLERANCE.get(name, 1e-9))
    ]
    if any(name != _FREQUENCIES and name.startswith(("rotary", "rope", "yarn")) for name in names):
        names = [name for name in names if name != _FREQUENCIES]  # they follow from the others
    return [f"{name} is {saved[name]!r} there and {own[name]!r} here" for name in names]


def _in_force(config: Any, model: Any) -> Iterator[tuple[str, Any]]:
    names = [*_ALWAYS]
    latent = getattr(config, "multi_latent_attention", False)
    names += _LATENT if latent else _GROUPED_QUERIES
    if latent and getattr(config, "rope_type", None) == "yarn":
        names += _LATENT_YARN
    if getattr(config, "window_size", None) is not None:
        names.append("window_attn_skip_freq")
    if getattr(config, "gated_linear_unit", False):
        names.append("glu_linear_offset")
    if getattr(config, "num_moe_experts", None):
        names += _EXPERTS
    if getattr(config, "is_hybrid_model", False):
        names += _MAMBA
    if getattr(config, "linear_attention_freq", None) is not None:
        names += _DELTA
    if getattr(config, "experimental_attention_variant", None) is not None:
        names += _SPARSE
    for name in names:
        if hasattr(config, name):
            yield name, getattr(config, name)
    yield from _of_model(config, model, latent)


def _of_model(config: Any, model: Any, latent: bool) -> Iterator[tuple[str, Any]]:
    """Settings that Megatron gives to GPTModel and similar classes, not to their configuration."""
    kind = getattr(model, "position_embedding_type", None)
    if kind is None:
        return
    yield "position_embedding_type", kind
    if hasattr(model, "share_embeddings_and_output_weights"):
        shared = model.share_embeddings_and_output_weights
        yield "share_embeddings_and_output_weights", shared
    if latent or kind not in _ROTARY:
        return
    yield "rotary_interleaved", getattr(config, "rotary_interleaved", None)
    for name in ("rotary_base", "rotary_percent", "rotary_scaling", "mrope_section"):
        if hasattr(model, name):
            yield name, getattr(model, name)
    if kind == "yarn":
        for name in sorted(vars(config)):
            if name.startswith("yarn_"):
                yield name, getattr(config, name)
    embedding = getattr(model, "rotary_pos_emb", None)
    factor = getattr(embedding, "seq_len_interpolation_factor", None)
    yield "rotary_seq_len_interpolation_factor", factor
    frequencies = getattr(embedding, "inv_freq", None)
    if torch.is_tensor(frequencies) and frequencies.numel() > 1 and not frequencies.is_meta:
        yield _FREQUENCIES, [frequencies.numel(), *frequencies[[1, -1]].tolist()]


def _inner(chunk: Any) -> Any:
    """The model inside its wrappers; of a model of images and text, its language model."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return getattr(chunk, "language_model", chunk)


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    """A value as JSON would bring it back; ``_NOT_PLAIN`` if it has no JSON form."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        values = [_plain(each) for each in value]
        return values if all(each is not _NOT_PLAIN for each in values) else _NOT_PLAIN
    if callable(value):
        name = getattr(value, "__name__", None) or getattr(value, "name", None)
        return name if isinstance(name, str) else type(value).__name__
    return _NOT_PLAIN


def _same(one: Any, two: Any, tolerance: float) -> bool:
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(
            _same(a, b, tolerance) for a, b in zip(one, two, strict=True)
        )
    if isinstance(one, (int, float)) and isinstance(two, (int, float)):
        return one == two or math.isclose(one, two, rel_tol=tolerance)
    return bool(one == two)
