"""The attentions that a run watches, and which of their weights a clip scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch.nn import Parameter

from megatron_muon.mcore.host.process_groups import Chunks, Sizes
from megatron_muon.mcore.qk_clip.local import MAXIMA
from megatron_muon.mcore.routing.attention import (
    GroupedRows,
    projections_of,
    self_attentions,
)
from megatron_muon.mcore.routing.param_routing import Weight, weights
from megatron_muon.settings.config import MuonConfig, named

# a projection's parameters: rows, which a clip scales, and a norm before them
_PROJECTION = ("weight", "bias", "layer_norm_weight", "layer_norm_bias")


class Clip(NamedTuple):
    """How logits are clipped: from which one on, and the queries' share in (0, 1)."""

    threshold: float
    alpha: float


@dataclass(frozen=True, slots=True)
class WatchedAttention:
    """An attention whose largest logits are reduced in each step."""

    core: Any  # the module that has the largest logits of this TP rank's heads
    heads: int  # number of heads over all TP ranks
    clip: Clip | None  # None where logits are only watched
    # the weights and biases that a clip scales, TP slices, with the rows of the whole
    # weight
    weights: dict[Parameter, GroupedRows]


def watched_attentions(
    model_chunks: Chunks, config: MuonConfig, tp_size: int
) -> Iterator[WatchedAttention]:
    """The attentions of this rank that are to be watched; an error names one that
    cannot be.
    """
    every = weights(model_chunks, Sizes(tp_size))
    by_param = {weight.param: weight for weight in every}
    # T5's relative positions
    biases = [w.name for w in by_param.values() if w.leaf == "relative_attention_bias"]
    for name, attention in self_attentions(model_chunks):
        model = attention.config
        if not is_watched(model, config):
            continue
        clip = clip_of(model, config)
        core = getattr(attention, "core_attention", None)
        _require_maxima(name, core, config)
        clipped: dict[Parameter, GroupedRows] = {}
        if clip is not None:
            _require_clippable(name, attention, config)
            clipped |= _clipped(name, attention, by_param)
            _refuse_unscaled([*biases, *_unscaled(name, attention)], config)
        yield WatchedAttention(core, model.num_attention_heads, clip, clipped)


def is_watched(model_config: Any, config: MuonConfig) -> bool:
    """Whether the largest logits of an attention with these settings are kept."""
    logs = bool(getattr(model_config, "log_max_attention_logit", False))
    return logs or clip_of(model_config, config) is not None


def clip_of(model_config: Any, config: MuonConfig) -> Clip | None:
    """The clip that Megatron's flags or the plugin's ask for, if any.

    Raises:
        ValueError: both ask for one, or a number is out of its range.
    """
    is_megatrons = getattr(model_config, "qk_clip", False)
    if config.qk_clip is not None:
        if not is_megatrons:
            return Clip(config.qk_clip, config.qk_clip_alpha)
        raise ValueError(
            f"{named('qk_clip')} {config.qk_clip} and Megatron's --qk-clip both clip "
            "the attention's logits. Use only one of the two"
        )
    if not is_megatrons:
        return None
    threshold, alpha = model_config.qk_clip_threshold, model_config.qk_clip_alpha
    if not threshold > 0:
        raise ValueError(
            f"Megatron's --qk-clip-threshold must be above 0, got {threshold}"
        )
    if not 0 < alpha < 1:
        raise ValueError(
            f"Megatron's --qk-clip-alpha must be between 0 and 1, got {alpha}"
        )
    return Clip(threshold, alpha)


def _flag(config: MuonConfig) -> str:
    return named("qk_clip") if config.qk_clip is not None else "--qk-clip"


def _require_maxima(name: str, core: Any, config: MuonConfig) -> None:
    """Refuse an attention that neither keeps its largest logits nor shows its
    logits.
    """
    if hasattr(core, MAXIMA):  # Transformer Engine's has it where Megatron's flags ask
        return
    if not isinstance(core, DotProductAttention):
        kind = type(core).__name__
        raise NotImplementedError(
            f"{_flag(config)}: {name} computes its logits in a {kind}, which does not "
            "tell their maximum. Transformer Engine's attention does with Megatron's "
            "own --qk-clip (core 0.16 and Transformer Engine 2.9 on), and Megatron's "
            "DotProductAttention does with either flag (--transformer-impl local): "
            "take one of these, or run without the clip"
        )
    window = getattr(core.scale_mask_softmax, "window_size", None)  # since core 0.15
    if window is not None:
        raise NotImplementedError(
            f"{_flag(config)}: {name} has window_size={window}, and the largest logit "
            "inside a window is not computed. Use only one of the two"
        )


def _require_clippable(name: str, attention: Any, config: MuonConfig) -> None:
    if not isinstance(attention, (SelfAttention, MLASelfAttention)):
        raise NotImplementedError(
            f"{_flag(config)}: the rows of the heads of {name}, a "
            f"{type(attention).__name__}, are not known: run without the clip"
        )
    model = attention.config
    norm = "qk_l2_norm" if getattr(model, "qk_l2_norm", False) else "qk_layernorm"
    # a spec may have norms that the settings do not name
    norms = (getattr(attention, each, None) for each in ("q_layernorm", "k_layernorm"))
    has_norm = any(not isinstance(each, (NoneType, IdentityOp)) for each in norms)
    normed = has_norm or getattr(model, norm)
    if normed and isinstance(attention, SelfAttention):
        raise ValueError(
            f"{_flag(config)} with {norm} (--{norm.replace('_', '-')}): {name} "
            "normalizes queries and keys after their projection, so smaller weights "
            "would not make smaller logits, and each step would shrink them again. "
            "Use only one of the two"
        )


def _clipped(
    name: str,
    attention: Any,
    by_param: dict[Parameter, Weight],
) -> Iterator[tuple[Parameter, GroupedRows]]:
    for linear, latent in _linears(attention):
        param = _weight_of(name, linear, getattr(attention, linear, None))
        weight = by_param[param]
        rows = param.shape[0] * weight.tp_size
        whole = latent or projections_of(weight, rows)
        if whole is None or whole.rows != rows:
            raise NotImplementedError(
                f"{name}.{linear}.weight: which of its {rows} rows over "
                f"{weight.tp_size} TP ranks belong to which head is not known, so its "
                "logits cannot be clipped: run without the clip"
            )
        yield param, whole
        bias = getattr(getattr(attention, linear), "bias", None)
        if isinstance(bias, Parameter):
            yield bias, whole


def _unscaled(name: str, attention: Any) -> Iterator[str]:
    """Names of an attention's parameters that may be part of a logit, and that no clip
    scales.
    """
    linears = [linear for linear, _ in _linears(attention)]
    # Transformer Engine's largest logit can be a softmax's learned offset
    is_local = isinstance(attention.core_attention, DotProductAttention)
    for path, _ in attention.named_parameters():
        module, _, rest = path.partition(".")
        if module in linears:
            is_known = rest in _PROJECTION
        elif module == "core_attention":
            is_known = is_local and rest == "softmax_offset"
        else:
            is_known = rest != ""  # those of the attention itself can be a scale
        if not is_known:
            yield f"{name}.{path}"


def _refuse_unscaled(names: list[str], config: MuonConfig) -> None:
    if names:
        raise NotImplementedError(
            f"{_flag(config)}: {names[0]} may be part of a largest logit, and a clip "
            "does not scale it, so each step could shrink the weights again: run "
            "without the clip"
        )


def _linears(attention: Any) -> Iterator[tuple[str, GroupedRows | None]]:
    """The linears that a clip scales, with their rows; None for those of a fused
    projection.
    """
    if isinstance(attention, SelfAttention):
        yield "linear_qkv", None
        return
    model = attention.config
    heads = model.num_attention_heads
    head = model.qk_head_dim
    queries = (("q", head), ("rotary", model.qk_pos_emb_head_dim))
    keys = (("k", head), ("v", model.v_head_dim))
    linear = "linear_q_proj" if model.q_lora_rank is None else "linear_q_up_proj"
    yield linear, GroupedRows(heads, queries, is_latent=True)
    yield "linear_kv_up_proj", GroupedRows(heads, keys, is_latent=True)


def _weight_of(name: str, linear: str, module: Any) -> Parameter:
    """The plain 2-D weight of a linear of an attention."""
    param = getattr(module, "weight", None)
    if not isinstance(param, Parameter) or param.dim() != 2:
        raise NotImplementedError(
            f"{name}.{linear} is a {type(module).__name__} without a 2-D weight of its "
            "own, so its logits cannot be clipped: run without the clip"
        )
    return param
