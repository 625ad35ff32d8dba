"""The settings of a run, which all ranks compare before anything else.

What follows has votes and exchanges that depend on settings. Ranks that disagree would wait for
each other, or raise errors of Megatron's that name no setting.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.mcore.wiring.buffers.shards import device_of
from megatron_muon.planning import agreed
from megatron_muon.runtime.consensus import agree_on_settings
from megatron_muon.settings.config import MuonConfig

# A bucket's size may come from the parameters of a stage; a rank may log into a folder of its own.
_MAY_DIFFER = ("optimizer", "bucket_size", "config_logger_dir")
_OF_MODEL = ("qk_clip", "qk_clip_threshold", "qk_clip_alpha", "log_max_attention_logit")


def agree(
    config: MuonConfig, optimizer_config: Any, model_chunks: Sequence[Any], *, asks: bool
) -> None:
    """Compare the settings of all ranks: the plugin's, and Megatron's for the optimizer.

    Args:
        config: the plugin's.
        optimizer_config: Megatron's OptimizerConfig.
        model_chunks: this rank's model chunks.
        asks: whether this rank asks anything of the plugin; see ``agree_on_settings``.

    Raises:
        PlanMismatchError: names the first setting that differs.
    """
    chunk = model_chunks[0]
    lines = agreed.of_run(config, optimizer_config.optimizer, megatron_version()[0])
    lines += _fields("OptimizerConfig", optimizer_config)
    if hasattr(chunk, "ddp_config"):
        lines += _fields("DistributedDataParallelConfig", chunk.ddp_config)
    model = get_model_config(chunk)
    lines += [f"{name} of the model: {getattr(model, name, None)!r}" for name in _OF_MODEL]
    agree_on_settings(lines, asks=asks, device=lambda: device_of(model_chunks))


def _fields(name: str, config: Any) -> Iterator[str]:
    """The fields of a configuration; of objects that have no plain value, only the type."""
    for field in fields(config):
        if field.name not in _MAY_DIFFER:
            value = getattr(config, field.name)
            said = repr(value) if isinstance(value, _PLAIN) else type(value).__name__
            yield f"{name}.{field.name}: {said}"


_PLAIN = (bool, int, float, str, tuple, list, torch.dtype, enum.Enum, type(None))
