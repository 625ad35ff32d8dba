"""The largest logit of each head in Megatron's own attention, which only computes the
softmax.

Transformer Engine's attention has the logits' maxima itself. Megatron's
``DotProductAttention`` hands all logits to a softmax module; a hook before that takes
their maximum.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

# The name in Megatron's attention over Transformer Engine, since core 0.16. Megatron's
# loop sets it to None after the step.
MAXIMA = "current_max_attn_logits"


def collect_maxima(core_attention: Any) -> None:
    """From now on keep the maxima of training's forward passes in
    ``current_max_attn_logits``.

    It is None, or (heads of this TP rank,) in fp32: the largest scaled logit that the
    mask lets through since it was last None. A second call has no effect.
    """
    if hasattr(core_attention, MAXIMA):
        return
    setattr(core_attention, MAXIMA, None)

    def before_softmax(softmax: Any, inputs: tuple[Any, ...]) -> None:
        if core_attention.training:
            scores, mask = inputs[:2]
            largest = _largest(softmax, scores, mask)
            before = getattr(core_attention, MAXIMA)
            if before is not None:
                largest = torch.max(before, largest)
            setattr(core_attention, MAXIMA, largest)

    core_attention.scale_mask_softmax.register_forward_pre_hook(before_softmax)


@torch.no_grad()
def _largest(softmax: Any, scores: Tensor, mask: Tensor | None) -> Tensor:
    """(heads,) in fp32: the largest of (batch, heads, queries, keys) logits under the
    mask.
    """
    queries, keys = scores.shape[-2:]
    if mask is None and softmax.attn_mask_type == AttnMaskType.causal and queries > 1:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1)
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    largest = scores.amax(dim=(0, 2, 3)).float()
    return largest if softmax.scale is None else largest * softmax.scale
