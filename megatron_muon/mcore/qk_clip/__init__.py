"""QK-Clip on shards: heads whose attention logits pass a threshold get smaller query
and key rows.

The largest logit of each head is collected during a step's forward passes, by
Transformer Engine's attention or here (``local``), and reduced over the stage. ``clip``
then scales what each rank holds of the weights, by the factors of ``factors`` for the
rows of ``heads``. Source: Kimi K2 (arXiv 2507.20534), section 2.1; the operations are
those of Megatron's ``clip_qk`` (core 0.16).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.transformer.attention import Attention
from megatron.core.utils import get_model_config

from megatron_muon.settings.config import MuonConfig


def is_wanted(
    optimizer_config: Any, model_chunks: Sequence[Any], config: MuonConfig
) -> bool:
    """Whether the plugin watches or clips the logits of this run; the same on every
    rank.

    Without the distributed optimizer Megatron's own clip has whole matrices: it is left
    alone.
    """
    if config.qk_clip is not None or not optimizer_config.use_distributed_optimizer:
        return config.qk_clip is not None
    each = [
        getattr(one, "log_max_attention_logit", False) for one in _configs(model_chunks)
    ]
    return is_asked(model_chunks, config) or (any(each) and not uses_fsdp(model_chunks))


def is_asked(model_chunks: Sequence[Any], config: MuonConfig) -> bool:
    """Whether a flag of Megatron's or of this plugin's asks to clip logits.

    The same on all ranks, also those whose stage has no attention.
    """
    asked = any(getattr(each, "qk_clip", False) for each in _configs(model_chunks))
    return asked or config.qk_clip is not None


def uses_fsdp(model_chunks: Sequence[Any]) -> bool:
    """Whether the model is wrapped in Megatron's FSDP, by the newer or the older
    name.
    """
    names = ("use_megatron_fsdp", "use_custom_fsdp")
    return any(
        getattr(getattr(model_chunks[0], "ddp_config", None), name, False)
        for name in names
    )


def _configs(model_chunks: Sequence[Any]) -> Iterator[Any]:
    """Settings of the model, and of its parts that have settings of their own."""
    for chunk in model_chunks:
        yield get_model_config(chunk)
        for module in chunk.modules():
            if isinstance(module, Attention):
                yield module.config
