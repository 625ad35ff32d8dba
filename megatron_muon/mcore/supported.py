"""What cannot run under Muon yet: one clear error each, before the first collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config


def refuse_unsupported(optimizer_config: Any, model_chunks: Sequence[Any]) -> None:
    """Check the options of a run that asks for ``optimizer='muon'``.

    Args:
        optimizer_config: Megatron's OptimizerConfig.
        model_chunks: the DDP-wrapped model chunks of this rank.

    Raises:
        ValueError: an option contradicts Distributed Muon, or would be ignored.
        NotImplementedError: a mode that Muon does not have yet; names the option and the way out.
    """
    ddp_configs = [chunk.ddp_config for chunk in model_chunks if hasattr(chunk, "ddp_config")]
    for config in (optimizer_config, *ddp_configs):
        if not config.use_distributed_optimizer:
            raise ValueError(
                "optimizer='muon' shards over Megatron's distributed optimizer, but "
                f"{type(config).__name__}.use_distributed_optimizer is False: set it in "
                "OptimizerConfig and DistributedDataParallelConfig (--use-distributed-optimizer), "
                "or choose optimizer='adam'"
            )
    if not optimizer_config.decoupled_weight_decay:
        raise ValueError(
            "optimizer='muon' decays weights as AdamW does: set decoupled_weight_decay=True, or "
            "choose optimizer='adam' for L2 regularization"
        )
    _refuse_ignored_settings(optimizer_config)
    modes = [*_optimizer_modes(optimizer_config), *_model_modes(model_chunks)]
    for option, value, way_out in modes:
        if value:
            raise NotImplementedError(
                f"optimizer='muon' does not support {option} yet (got {value!r}): {way_out}, or "
                "choose optimizer='adam'"
            )
    for chunk in model_chunks:
        if not isinstance(chunk, DistributedDataParallel):
            raise NotImplementedError(
                f"optimizer='muon' does not support {type(chunk).__name__} yet: wrap model chunks "
                "in Megatron's DistributedDataParallel, or choose optimizer='adam'"
            )


def _refuse_ignored_settings(optimizer_config: Any) -> None:
    """Megatron's own ``muon_*`` fields are for its other Muon; ignoring a set one would mislead."""
    for field in dataclasses.fields(optimizer_config):
        value = getattr(optimizer_config, field.name)
        if field.name.startswith("muon_") and value != field.default:
            raise ValueError(
                f"OptimizerConfig.{field.name}={value!r} configures Megatron's own Muon and has no "
                "effect here: give settings to megatron_muon.install(MuonConfig(...))"
            )


def _optimizer_modes(config: Any) -> Iterator[tuple[str, Any, str]]:
    yield "fp16", config.fp16, "use bf16 or fp32"
    yield (
        "use_precision_aware_optimizer",
        config.use_precision_aware_optimizer,
        "keep fp32 main parameters by leaving it off",
    )
    yield "optimizer_cpu_offload", config.optimizer_cpu_offload, "leave it off"
    yield (
        "overlap_param_gather_with_optimizer_step",
        config.overlap_param_gather_with_optimizer_step,
        "use overlap_param_gather",
    )
    graph = getattr(config, "optimizer_cuda_graph", False)
    yield "optimizer_cuda_graph", graph, "leave it off"


def _model_modes(model_chunks: Sequence[Any]) -> Iterator[tuple[str, Any, str]]:
    ddp = model_chunks[0].ddp_config
    model = get_model_config(model_chunks[0])
    yield "use_megatron_fsdp", ddp.use_megatron_fsdp, "use the distributed optimizer without FSDP"
    instances = ddp.num_distributed_optimizer_instances
    yield (
        "num_distributed_optimizer_instances",
        instances if instances > 1 else 0,
        "use one instance",
    )
    yield "fp8", getattr(model, "fp8", None), "train in bf16 or fp32"
    yield "fp4", getattr(model, "fp4", None), "train in bf16 or fp32"
    size = model.context_parallel_size
    yield "context_parallel_size", size if size > 1 else 0, "use context_parallel_size=1"
    yield "num_moe_experts", getattr(model, "num_moe_experts", None), "train a dense model"
    yield (
        "multi_latent_attention",
        getattr(model, "multi_latent_attention", False),
        "use multi-head or grouped-query attention",
    )
    yield "mtp_num_layers", getattr(model, "mtp_num_layers", None), "leave it unset"
    chunks = len(model_chunks)
    yield (
        "virtual_pipeline_model_parallel_size",
        chunks if chunks > 1 else 0,
        "use one model chunk per pipeline stage",
    )
