"""Which weights are fused projections of an attention, and in which order their rows
lie.

Megatron's classes say it; the name alone only where a class is not Megatron's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.attention import Attention, CrossAttention, SelfAttention

from megatron_muon.mcore.host.process_groups import Chunks
from megatron_muon.mcore.routing.param_routing import Weight, is_adapter, modules

# Names of what may hold projections side by side, in models of all kinds.
_FUSED = re.compile(r"qkv|query_key_value|(^|_)kv(_|$)|c_attn", re.IGNORECASE)
# multi-latent attention's
_LATENT = re.compile(r"_(down|up)_proj$")


def self_attentions(
    model_chunks: Chunks,
) -> Iterator[tuple[str, Any]]:
    """Name and module of each attention whose queries and keys come from one
    sequence.
    """
    for prefix, module, _ in modules(model_chunks):
        if isinstance(module, Attention) and not isinstance(module, CrossAttention):
            yield prefix.removesuffix("."), module


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """The rows of a whole weight, over all TP ranks, which repeat group by group."""

    groups: int
    parts: tuple[tuple[str, int], ...]  # (part, rows of it in one group), in order
    is_latent: bool = False  # an up-projection of multi-latent attention

    @property
    def rows(self) -> int:
        """Rows of the whole weight."""
        return self.groups * sum(count for _, count in self.parts)


# Rows of a fused projection, and whether Megatron's class or its name for it says so;
# else they are only right if their number fits.
_Known = tuple[GroupedRows, bool]


def projections_of(weight: Weight, rows: int) -> GroupedRows | None:
    """How a fused projection's rows lie; None of any other weight, and where it is not
    known. Its groups are query groups, whose last part is one head of values.

    ``linear_qkv`` of a ``SelfAttention`` and ``linear_kv`` of a ``CrossAttention``,
    whatever wraps the linear, by the attention's own settings, which may differ from
    its model's (vision encoders, heterogeneous layers). In a class that is not
    Megatron's a ``linear_qkv.weight``, by its name. ``rows`` are those of the 2-D
    weight over all TP ranks.
    """
    if is_adapter(weight) or not weight.name.endswith(".weight"):
        return None
    known = _by_class(weight) or _by_name(weight)
    if known is None:
        return None
    projections, is_certain = known
    return projections if is_certain or projections.rows == rows else None


def is_unknown_fusion(weight: Weight, rows: int) -> bool:
    """By its name a 2-D weight holds several projections, but how its rows lie is not
    known.
    """
    # what may wrap the linear, the linear, its parameter
    names = weight.name.split(".")[-3:]
    is_fused = any(_FUSED.search(name) and not _LATENT.search(name) for name in names)
    return is_fused and not is_adapter(weight) and projections_of(weight, rows) is None


def _by_class(weight: Weight) -> _Known | None:
    linear = weight.module
    for depth, outer in enumerate(weight.holders):
        if isinstance(outer, SelfAttention) and linear is getattr(
            outer, "linear_qkv", None
        ):
            return _self_attention(outer.config), depth == 0
        if isinstance(outer, CrossAttention) and linear is getattr(
            outer, "linear_kv", None
        ):
            heads, head = outer.config.num_attention_heads, outer.config.kv_channels
            return GroupedRows(heads, (("k", head), ("v", head))), depth == 0
        linear = outer
    return None


def _by_name(weight: Weight) -> _Known | None:
    sizes = ("num_attention_heads", "num_query_groups", "kv_channels")
    known = all(getattr(weight.model_config, size, None) for size in sizes)
    if not known or not weight.name.endswith("linear_qkv.weight"):
        return None
    is_certain = weight.name.endswith("self_attention.linear_qkv.weight")
    return _self_attention(weight.model_config), is_certain


def _self_attention(model: Any) -> GroupedRows:
    """Per query group its q heads, their gates if any, its k, its v."""
    heads, head = model.num_attention_heads // model.num_query_groups, model.kv_channels
    has_gate = getattr(model, "attention_output_gate", False)
    gate = (("gate", heads * head),) if has_gate else ()
    parts = (("q", heads * head), *gate, ("k", head), ("v", head))
    return GroupedRows(model.num_query_groups, parts)
