"""The largest attention logits, which attentions keep until they are reset after a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.attention import Attention, CrossAttention
from torch import Tensor

from megatron_muon.mcore.qk_clip.local import MAXIMA
from megatron_muon.mcore.routing.param_routing import layers
from megatron_muon.runtime.collectives import Group


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """A self-attention that keeps the largest logit of each head."""

    rows: list[str]  # one for each group of heads that share keys, over all TP ranks
    core: Any  # the module that has them
    heads: int  # over all TP ranks

    def put_into(self, maxima: Tensor, tp: Group) -> None:
        """Raise ``(len(rows),)`` fp32 to the logits of this rank's heads, if it has run."""
        kept = getattr(self.core, MAXIMA, None)
        if kept is None:
            return
        kept = kept.detach().to(maxima).view(-1)
        first = tp.rank() * kept.numel()
        heads = torch.arange(first, first + kept.numel(), device=maxima.device)
        maxima.scatter_reduce_(0, heads * len(self.rows) // self.heads, kept, "amax")


def kept_logits(
    model_chunks: Sequence[torch.nn.Module], threshold: float | None
) -> Iterator[KeptLogits]:
    """Each self-attention of this rank that keeps its largest logits.

    Its settings ask for that, or the plugin's own do (``MuonConfig.qk_clip``), the ``threshold``.
    """
    for name, layer in layers(model_chunks):
        for path, module in layer.named_modules():
            if not isinstance(module, Attention) or isinstance(module, CrossAttention):
                continue
            model, asked = module.config, ("log_max_attention_logit", "qk_clip")
            if threshold is not None or any(getattr(model, setting, False) for setting in asked):
                groups = range(model.num_query_groups)
                rows = [f"{name}.{path}[group {group}]" for group in groups]
                yield KeptLogits(rows, module.core_attention, model.num_attention_heads)
