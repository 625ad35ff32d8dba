"""The largest attention logits of a step, where the model's attention keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.attention import Attention, CrossAttention
from torch import Tensor

from megatron_muon.mcore.routing.param_routing import layers
from megatron_muon.runtime.collectives import Group

# The name in Megatron's attention over Transformer Engine, since core 0.16: (heads of this TP rank,
# ), the largest logits since it was None. Megatron's loop sets it to None after the step.
_MAXIMA = "current_max_attn_logits"


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """A self-attention that keeps the largest logit of each head.

    Attributes:
        name: numbered over all pipeline stages.
        core: the module that has them.
        heads, groups: number of heads and of the groups that share keys, over all TP ranks.
    """

    name: str
    core: Any
    heads: int
    groups: int

    def rows(self) -> list[str]:
        """The name of each group's row."""
        return [f"{self.name}[group {group}]" for group in range(self.groups)]

    def put_into(self, maxima: Tensor, tp: Group) -> None:
        """Raise ``(groups,)`` fp32 to the logits of this rank's heads, if it has run."""
        kept = getattr(self.core, _MAXIMA, None)
        if kept is None:
            return
        kept = kept.detach().to(maxima).view(-1)
        first = tp.rank() * kept.numel()
        heads = torch.arange(first, first + kept.numel(), device=maxima.device)
        maxima.scatter_reduce_(0, heads * self.groups // self.heads, kept, "amax")


def kept_logits(model_chunks: Sequence[torch.nn.Module], is_clipped: bool) -> Iterator[KeptLogits]:
    """Each self-attention of this rank whose settings ask for its largest logits.

    Args:
        model_chunks: this rank's.
        is_clipped: the plugin's own setting asks, too (``MuonConfig.qk_clip``).
    """
    for name, layer in layers(model_chunks):
        for path, module in layer.named_modules():
            if not isinstance(module, Attention) or isinstance(module, CrossAttention):
                continue
            model, core = module.config, module.core_attention
            asked = ("log_max_attention_logit", "qk_clip")
            if is_clipped or any(getattr(model, setting, False) for setting in asked):
                heads, groups = model.num_attention_heads, model.num_query_groups
                yield KeptLogits(f"{name}.{path}", core, heads, groups)


def clip_threshold(model_chunks: Sequence[torch.nn.Module], own: float | None) -> float | None:
    """The threshold of the run's clip of logits; None where nothing clips.

    Args:
        model_chunks: this rank's.
        own: the plugin's setting (``MuonConfig.qk_clip``).
    """
    if own is not None:
        return float(own)
    for _, layer in layers(model_chunks):
        model: Any = getattr(layer, "config", None)
        if getattr(model, "qk_clip", False):
            return float(model.qk_clip_threshold)
    return None
