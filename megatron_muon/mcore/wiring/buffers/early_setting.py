"""Whether gathers of parameters start within the step (``early_param_gather``)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_muon.settings.config import MuonConfig, named


def settled(
    config: MuonConfig, optimizer_config: Any, model_chunks: Sequence[Any]
) -> tuple[MuonConfig, str | None]:
    """The settings, with ``early_param_gather`` ``off`` where it cannot work.

    Returns:
        The settings, and what forbids early gathers that ``auto`` wants, or None.

    Raises:
        ValueError: it is ``on``, and Megatron gathers after the step, or starts a
            gather by itself.
        NotImplementedError: it is ``on``, and parameters change between the step and
            the gather.
    """
    overlaps = model_chunks[0].ddp_config.overlap_param_gather
    found = _hindrances(config, optimizer_config, get_model_config(model_chunks[0]))
    what, error = next(found, (None, None))
    if config.early_param_gather != "on":
        wanted = config.early_param_gather or (
            "auto" if config.preset == "fast" else "off"
        )
        can_be = overlaps and error is None
        config = replace(config, early_param_gather=wanted if can_be else "off")
        return config, what if overlaps and wanted == "auto" else None
    if not overlaps:
        raise ValueError(
            f"{named('early_param_gather')} starts the gathers of overlap_param_gather "
            "(--overlap-param-gather), which is off: set it, or leave this out"
        )
    if error is not None:
        raise error
    return config, None


def _hindrances(
    config: MuonConfig, optimizer_config: Any, model: Any
) -> Iterator[tuple[str, Exception]]:
    """What forbids it, and the error where it is asked for nevertheless."""
    graph = (
        f"{getattr(model, 'cuda_graph_impl', '')} "
        f"{getattr(model, 'cuda_graph_scope', '')}"
    )
    for found, what, why, error in (
        (
            optimizer_config.overlap_param_gather_with_optimizer_step,
            "overlap_param_gather_with_optimizer_step "
            "(--overlap-param-gather-with-optimizer-step)",
            "both start the first gather",
            ValueError,
        ),
        (
            config.full_period > 1,
            named("full_period"),
            "block steps have other rounds",
            NotImplementedError,
        ),
        (
            optimizer_config.optimizer_cpu_offload,
            "optimizer_cpu_offload (--optimizer-cpu-offload)",
            "AdamW's part, on the host, ends last",
            NotImplementedError,
        ),
        (
            getattr(optimizer_config, "reuse_grad_buf_for_mxfp8_param_ag", False),
            "reuse_grad_buf_for_mxfp8_param_ag (--reuse-grad-buf-for-mxfp8-param-ag)",
            "parameters travel in the memory of gradients, which a step still reads",
            NotImplementedError,
        ),
        (
            "full_iteration" in re.findall(r"\w+", graph),  # it may be a list of scopes
            "a CUDA graph of the full iteration (--cuda-graph-impl, "
            "--cuda-graph-scope)",
            "the graph would wait for a gather outside of it",
            NotImplementedError,
        ),
        (
            config.qk_clip is not None or getattr(model, "qk_clip", False),
            "clipped attention logits (--qk-clip, --muon-qk-clip)",
            "weights are gathered before they are clipped",
            NotImplementedError,
        ),
    ):
        if found:
            setting = named("early_param_gather")
            yield what, error(f"{setting} with {what}: {why}. Use only one of the two")


def gathers_one_by_one(device: torch.device) -> bool:
    """Whether two gathers that are launched in a row would hold up what is launched
    after them.

    A GPU with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron demands
    with TP or CP before Blackwell) starts kernels in the order in which they are
    launched, and the second gather waits for the first one. A gather that takes longer
    than a round holds up the next.
    """
    return (
        device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    )
