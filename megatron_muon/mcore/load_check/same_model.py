"""What a digest says of a model, and whether a checkpoint was saved by the model that loads it.

``parameters``: names, shapes and owners, which do not depend on the model's parallelism.
``model``: settings that change the function it computes, though its weights keep their shapes. How
the function is computed (parallelism, precision, fusions) or trained (dropout, a router's losses)
is left out, and so are most sizes, which shapes tell.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron_muon.mcore.load_check.digest import DigestError, first_names
from megatron_muon.mcore.load_check.models import TrainedModel
from megatron_muon.mcore.routing.param_routing import (
    Weight,
    expert_name,
    partition_dim_of,
    weights,
    why_adamw,
)
from megatron_muon.mcore.wiring.buffers.placement import local_experts
from megatron_muon.mcore.wiring.buffers.shards import device_of
from megatron_muon.mcore.wiring.process_groups import Sizes
from megatron_muon.runtime.collectives import all_gather_texts
from megatron_muon.runtime.consensus import together

Table = dict[str, dict[str, Any]]
Settings = dict[str, Any]

# Settings of a model's configuration, where it has them.
_OF_CONFIG = """
num_layers hidden_size num_attention_heads num_query_groups kv_channels softmax_scale softmax_type
window_size window_attn_skip_freq no_rope_freq qk_layernorm qk_l2_norm attention_output_gate
experimental_attention_variant normalization layernorm_epsilon layernorm_zero_centered_gamma
apply_residual_connection_post_layernorm add_bias_linear add_qkv_bias activation_func
gated_linear_unit activation_func_clamp_value glu_linear_offset enable_mhc_connections
mtp_num_layers mtp_use_repeated_layer rotary_interleaved
multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim v_head_dim qk_pos_emb_head_dim
rope_type rotary_base rotary_percent
num_moe_experts moe_layer_freq moe_router_topk moe_router_pre_softmax moe_router_score_function
moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
moe_router_enable_expert_bias moe_apply_probs_on_input moe_shared_expert_intermediate_size
moe_shared_expert_gate moe_latent_size
mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
linear_num_key_heads linear_num_value_heads dsa_indexer_n_heads dsa_indexer_head_dim
dsa_indexer_topk
yarn_rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
yarn_mscale yarn_mscale_all_dim yarn_correction_range_round_to_int
""".split()
# Those of multi-latent attention, and with YaRN; two have other defaults before core 0.14.
_LATENT = "q_lora_rank kv_lora_rank qk_head_dim v_head_dim qk_pos_emb_head_dim rope_type".split()
_OF_YARN = (
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim"),
)
# Beginnings of names, and the setting without which those have no effect.
_WITH = (
    *(("window_attn", "window_size"), ("linear_", "linear_attention_freq")),
    ("dsa_", "experimental_attention_variant"),
)
_FREQUENCIES = "rotary_frequencies"  # their number, the second and the last one
# Settings that Megatron gives to GPTModel and similar classes, not to their configuration.
_OF_MODEL = (
    *("position_embedding_type", "share_embeddings_and_output_weights", "rotary_base"),
    *("rotary_percent", "rotary_scaling", "mrope_section"),
)
SETTINGS_WAY_OUT = (
    "Start this run with the checkpoint's values. If the change is meant, as that of rotary "
    "settings for a longer context is: --no-muon-checkpoint-digest (checkpoint_digest=False in "
    "MuonConfig) loads it all without this check, until the first save; --finetune or "
    "--no-load-optim loads the weights and warns"
)
_NOT_PLAIN = object()

# The names of one weight in different classes that torch_dist loads into one another: three of
# experts, and Transformer Engine's fused MLP. (Norms have many more; only matrices are compared.)
_SAME = (
    (re.compile(r"\.experts\.local_experts\.\d+\.(linear_fc[12])\."), r".experts.\1."),
    (re.compile(r"\.experts\.(linear_fc[12])\.weight\d+$"), r".experts.\1.weight"),
    (re.compile(r"\.experts\.weight([12])$"), r".experts.linear_fc\1.weight"),
    (re.compile(r"\.mlp\.1\.basic_ops\.0\."), ".mlp.linear_fc1."),
    (re.compile(r"\.mlp\.3\.basic_ops\.0\."), ".mlp.linear_fc2."),
)
_VOCABULARY = re.compile(r"(^|\.)(word_embeddings|output_layer)\.weight$")


def model_in_digest(trained: TrainedModel | None) -> tuple[Table, Settings]:
    """``parameters`` and ``model`` of a digest, merged from all ranks; all of them call it."""
    chunks = trained.model_chunks() if trained else []
    own = together(lambda: _own_part(trained), None, device_of(chunks))
    every = [json.loads(text) for text in all_gather_texts(json.dumps(own), None)]
    table: Table = {name: entry for part in every for name, entry in part[0].items()}
    return table, next((part[1] for part in every if part[1]), {})


def check_model(
    saved: Mapping[str, Any], own: tuple[Table, Settings], tokens: int | None, folder: str
) -> tuple[str, list[str]]:
    """Refuse a checkpoint of a different model.

    Args:
        own: ``model_in_digest`` of the model that is to be loaded.
        tokens: its vocabulary before padding. If the digest has one, too, they are compared in
            place of the padded sizes, which depend on TP.

    Returns:
        Names of some parameters that only the checkpoint has, and a phrase for each setting that
        differs.

    Raises:
        DigestError: names the first parameter that differs.
    """
    different = f"{folder} was saved by a different model:"
    then, now = _sizes(saved["parameters"]), _sizes(own[0])
    if missing := now.keys() - then.keys():
        raise DigestError(f"{different} it has no {first_names(missing)}, which this model has")
    both_known = None not in (tokens, saved["vocabulary"])
    if both_known and tokens != saved["vocabulary"]:
        raise DigestError(
            f"{different} its vocabulary has {saved['vocabulary']} tokens, this run's has {tokens} "
            "(before padding). Load it with the tokenizer it was trained with"
        )
    for name in sorted(now):
        one, two = then[name], now[name]
        there: object
        here: object
        if len(one) == len(two) == 1:
            what, there, here = "shape", one[0], two[0]
        else:  # of several experts, which another class may hold in one
            what = "number of elements"
            there, here = (sum(map(math.prod, shapes)) for shapes in (one, two))
        if there != here and not (both_known and _VOCABULARY.search(name)):
            raise DigestError(
                f"{different} {name} has the {what} {there} there and {here} here, counted over "
                "all ranks"
            )
    changed = [
        f"{name} is {saved['model'][name]!r} there and {own[1][name]!r} here"
        for name in sorted(saved["model"].keys() & own[1].keys())
        if not _same(saved["model"][name], own[1][name], 1e-3 if name == _FREQUENCIES else 1e-9)
    ]
    return first_names(then.keys() - now.keys()), changed


# --- names, shapes and owners --------------------------------------------------------------------


def _own_part(trained: TrainedModel | None) -> tuple[Table, Settings]:
    if trained is None:
        return {}, {}
    chunks, stage = trained.model_chunks(), trained.stage
    if stage.ep is None or stage.expert_tp is None:
        speaks = dist.get_rank(stage.group) == 0
    else:
        speaks = stage.expert_tp.rank() == 0  # every EP rank has experts of its own
    table = _table(trained) if speaks and stage.instance == 0 else {}
    return table, _settings(chunks[0]) if chunks else {}


def _table(trained: TrainedModel) -> Table:
    stage, config, chunks = trained.stage, trained.config, trained.model_chunks()
    ep_rank = 0 if stage.ep is None else stage.ep.rank()
    experts = local_experts(chunks, stage.sizes.ep)
    table = {}
    for weight in weights(chunks):
        if weight.is_tied_copy:
            continue  # only some stages have it
        whose = "muon" if why_adamw(weight, stage.sizes.tp_of(weight), config) is None else "adamw"
        table[expert_name(weight.name, ep_rank, experts)] = {
            "shape": _whole_shape(weight, stage.sizes),
            "optimizer": whose if weight.param.requires_grad else "frozen",
        }
    return table


def _whole_shape(weight: Weight, sizes: Sizes) -> list[int]:
    shape, tp_size = list(weight.param.shape), sizes.tp_of(weight)
    if weight.is_module("GroupedMLP"):  # all experts in one, over EP and TP in the same dim
        shape[1 if weight.name.endswith("weight1") else 0] *= tp_size * sizes.ep
        return shape
    try:
        dim = partition_dim_of(weight, tp_size)
    except NotImplementedError:  # an expert's weight that is not Muon's
        marked = getattr(weight.param, "tensor_model_parallel", False)
        dim = int(getattr(weight.param, "partition_dim", 0)) if marked else None
    if dim is not None and dim < len(shape):
        shape[dim] *= tp_size
    return shape


def _sizes(table: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of matrices by one name, which experts of a layer may share.

    Vectors are left out, since TP may split some in an unknown way.
    """
    sizes: dict[str, list[tuple[int, ...]]] = {}
    for name, entry in table.items():
        shape = tuple(entry["shape"])
        if len(shape) < 2:
            continue
        for pattern, text in _SAME:
            name = pattern.sub(text, name)
        sizes.setdefault(name, []).append(shape)
    return sizes


# --- settings ------------------------------------------------------------------------------------


def _settings(chunk: Any) -> Settings:
    config = get_model_config(chunk)
    while hasattr(chunk, "module"):
        chunk = chunk.module
    model = getattr(chunk, "language_model", chunk)  # of a model of images and text
    names = [*_OF_CONFIG, *(_OF_YARN if getattr(config, "rope_type", None) == "yarn" else ())]
    found = {name: getattr(config, name) for name in names if hasattr(config, name)}
    found = {name: getattr(model, name) for name in _OF_MODEL if hasattr(model, name)} | found
    found = {name: value for name, value in found.items() if _is_in_force(name, config, model)}
    embedding = getattr(model, "rotary_pos_emb", None)
    frequencies = getattr(embedding, "inv_freq", None)
    if torch.is_tensor(frequencies) and frequencies.numel() > 1 and not frequencies.is_meta:
        ends = frequencies[[1, -1]].tolist()
        found[_FREQUENCIES] = [frequencies.numel(), *ends]
        interpolation = getattr(embedding, "seq_len_interpolation_factor", None)
        found["rotary_seq_len_interpolation_factor"] = interpolation
    plain = {name: _plain(value) for name, value in sorted(found.items())}
    return {name: value for name, value in plain.items() if value is not _NOT_PLAIN}


def _is_in_force(name: str, config: Any, model: Any) -> bool:
    """Whether a setting has any effect: a router's has none without experts, say."""
    kind = getattr(model, "position_embedding_type", None)
    latent = bool(getattr(config, "multi_latent_attention", False))
    has = {key: getattr(config, key, None) is not None for _, key in _WITH}
    if name in _LATENT or name in ("num_query_groups", "kv_channels"):
        return latent == (name in _LATENT)
    if name.startswith("moe_"):
        return bool(getattr(config, "num_moe_experts", None))
    if name.startswith("mamba_"):
        return bool(getattr(config, "is_hybrid_model", False))
    if name.startswith("yarn_"):
        return bool(kind == "yarn")
    if name.startswith("rotary_") or name == "mrope_section":
        return latent or kind in ("rope", "mrope", "yarn")
    return all(has[key] for start, key in _WITH if name.startswith(start) and name != key)


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
    """Whether settings are equal; frequencies are computed in fp32, on other devices otherwise."""
    if isinstance(one, list) and isinstance(two, list):
        pairs = zip(one, two, strict=False)
        return len(one) == len(two) and all(_same(*pair, tolerance) for pair in pairs)
    if isinstance(one, (int, float)) and isinstance(two, (int, float)):
        return one == two or math.isclose(one, two, rel_tol=tolerance)
    return bool(one == two)
