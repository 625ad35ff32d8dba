"""QK-Clip on shards: heads whose attention logits pass a threshold get smaller query
and key rows.

The largest logit of each head is collected during a step's forward passes, by
Transformer Engine's attention or here (``local``), and reduced over the stage. ``clip``
then scales what each rank holds of the weights, row by row (``factors``). Source: Kimi
K2 (arXiv 2507.20534), section 2.1; the operations are those of Megatron's ``clip_qk``
(core 0.16).
"""

from __future__ import annotations

from typing import Any

from megatron.core.utils import get_model_config

from megatron_muon.mcore.host.process_groups import Chunks
from megatron_muon.mcore.routing.attention import self_attentions
from megatron_muon.settings.config import MuonConfig


def is_wanted(optimizer_config: Any, model_chunks: Chunks, config: MuonConfig) -> bool:
    """Whether the plugin watches or clips the logits of this run; the same on every
    rank.

    Without the distributed optimizer Megatron's own clip has whole matrices, and the
    plugin does nothing.
    """
    if config.qk_clip is not None:
        return True
    if not optimizer_config.use_distributed_optimizer:
        return False
    logs = _is_on("log_max_attention_logit", model_chunks)
    return is_asked(model_chunks, config) or (logs and not uses_fsdp(model_chunks))


def is_asked(model_chunks: Chunks, config: MuonConfig) -> bool:
    """Whether a flag of Megatron's or of this plugin's asks to clip logits.

    The same on all ranks, also those whose stage has no attention.
    """
    return config.qk_clip is not None or _is_on("qk_clip", model_chunks)


def uses_fsdp(model_chunks: Chunks) -> bool:
    """Whether the model is wrapped in Megatron's FSDP, by the newer or the older
    name.
    """
    ddp_config = getattr(model_chunks[0], "ddp_config", None)
    names = ("use_megatron_fsdp", "use_custom_fsdp")
    return any(getattr(ddp_config, name, False) for name in names)


def _is_on(setting: str, model_chunks: Chunks) -> bool:
    """Whether the model has it on, or an attention with settings of its own."""
    configs = [get_model_config(chunk) for chunk in model_chunks]
    configs += [attention.config for _, attention in self_attentions(model_chunks)]
    return any(getattr(config, setting, False) for config in configs)
