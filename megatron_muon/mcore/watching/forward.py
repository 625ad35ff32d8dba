"""What forward passes show: sizes of the layers' outputs, and the largest attention
logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megatron_muon.mcore.host.process_groups import Chunks
from megatron_muon.mcore.qk_clip.attentions import clip_of, is_watched
from megatron_muon.mcore.qk_clip.local import MAXIMA
from megatron_muon.mcore.routing.attention import self_attentions
from megatron_muon.mcore.watching.rows import Message
from megatron_muon.runtime.collectives import Group
from megatron_muon.settings.config import MuonConfig


class LayerOutputs:
    """Sums of squares of the layers' outputs in training, over all microbatches of a
    step.

    Forward hooks see them, which are there before a logging step only.
    """

    def __init__(self, layers: Sequence[tuple[str, Module]]) -> None:
        self._layers = layers
        self._seen: list[tuple[str, Tensor, int]] = []
        self._hooks: list[Any] = []

    def expect(self, is_logged: bool) -> None:
        """Observe the next step's forward passes if it ``is_logged``; forget earlier
        ones.
        """
        self._seen.clear()
        if is_logged and not self._hooks:
            self._hooks = [
                module.register_forward_hook(self._hook(name))
                for name, module in self._layers
            ]
        if not is_logged:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def add_to(self, message: Message) -> None:
        """Add what was seen."""
        for row, norm, elements in self._seen:
            squares = norm.double().square()
            message.add("layers", row, output_squares=squares, elements=elements)

    def _hook(self, row: str) -> Any:
        def see(module: Module, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if not module.training or not isinstance(hidden, Tensor):
                return
            # a tensor kept here would not outlive the capture
            if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
                return
            with torch.no_grad():
                norm = torch.linalg.vector_norm(hidden.detach(), dtype=torch.float32)
            self._seen.append((row, norm, hidden.numel()))

        return see


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """A self-attention that keeps the largest logit of each head."""

    rows: list[str]  # one for each group of heads that share keys, over all TP ranks
    core: Any  # the module that has them
    heads: int  # over all TP ranks

    def put_into(self, maxima: Tensor, tp: Group) -> None:
        """Set ``maxima``, ``(len(rows),)`` fp32, to those of this rank's heads, -inf
        where it has none; no change if the attention has not run.
        """
        kept = getattr(self.core, MAXIMA, None)
        if kept is None:
            return
        of_heads = maxima.new_full((self.heads,), -torch.inf)
        of_heads.view(tp.size(), -1)[tp.rank()] = kept.detach().view(-1)
        maxima.copy_(of_heads.view(len(self.rows), -1).amax(1))


def kept_logits(model_chunks: Chunks, config: MuonConfig) -> Iterator[KeptLogits]:
    """The self-attentions of this rank that keep their largest logits."""
    for name, attention in self_attentions(model_chunks):
        model = attention.config
        if is_watched(model, config):
            rows = [f"{name}[group {at}]" for at in range(model.num_query_groups)]
            yield KeptLogits(rows, attention.core_attention, model.num_attention_heads)


def clip_threshold(model_chunks: Chunks, config: MuonConfig) -> float | None:
    """The threshold of the run's clip of logits, the plugin's or Megatron's, or
    None.
    """
    models = (attention.config for _, attention in self_attentions(model_chunks))
    clips = (clip_of(model, config) for model in models)
    return config.qk_clip or next((clip.threshold for clip in clips if clip), None)
