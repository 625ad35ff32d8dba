"""Options that cannot run under Muon yet: one clear error each, before the first collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config

from megatron_muon.mcore.routing.param_routing import weights
from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.settings.config import named


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
    if not getattr(optimizer_config, "decoupled_weight_decay", True):  # a choice since core 0.15
        raise ValueError(
            "optimizer='muon' decays weights as AdamW does: set decoupled_weight_decay=True, or "
            "choose optimizer='adam' for L2 regularization"
        )
    _refuse_ignored_settings(optimizer_config)
    modes = [
        *_optimizer_modes(optimizer_config),
        *_model_modes(model_chunks),
        *_upstream_faults(optimizer_config, get_model_config(model_chunks[0])),
    ]
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


def refuse_groups(arguments: Mapping[str, Any]) -> None:
    """Check the process groups among the arguments of ``get_megatron_optimizer``.

    Raises:
        NotImplementedError: core 0.14's way of giving them, which has no group of a stage.
    """
    for name in ("grad_comm_pgs", "model_comm_pgs"):
        if arguments.get(name) is not None:
            raise NotImplementedError(
                f"optimizer='muon' does not support {name}: leave it out to use Megatron's global "
                "groups, or take a Megatron from 0.15 on and pass pg_collection"
            )


def refuse_overrides(arguments: Mapping[str, Any]) -> None:
    """Check the ``config_overrides`` of ``get_megatron_optimizer``, which core 0.16 brought.

    Raises:
        ValueError: one of them names an optimizer, which nothing would read.
    """
    for key, override in (arguments.get("config_overrides") or {}).items():
        if "optimizer" in override:
            other = "muon_include" if override["optimizer"] == "muon" else "muon_exclude"
            raise ValueError(
                f"config_overrides asks for the optimizer {override['optimizer']!r} of {key}, "
                f"which has no effect here: name these weights in {named(other)} of MuonConfig"
            )


def frozen_too_late(model_chunks: Sequence[Any]) -> ValueError | None:
    """The error for a weight that was frozen once it had a place in DDP's gradient buffers.

    Megatron's DistributedOptimizer would look for it among the parameters that train. One stage may
    have such a weight and another not, so the caller raises it on all ranks.
    """
    for weight in weights(model_chunks):
        if not weight.param.requires_grad and any(
            weight.param in buffer.param_index_map
            for chunk in model_chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ):
            return ValueError(
                f"{weight.name} is frozen, but has a place in DDP's gradient buffers: freeze "
                "parameters before wrapping the model in DistributedDataParallel"
            )
    return None


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
    yield (
        "use_precision_aware_optimizer",
        config.use_precision_aware_optimizer,
        "keep fp32 main parameters by leaving it off",
    )
    yield "optimizer_cpu_offload", config.optimizer_cpu_offload, "leave it off"
    graph = getattr(config, "optimizer_cuda_graph", False)
    yield "optimizer_cuda_graph", graph, "leave it off"


def _model_modes(model_chunks: Sequence[Any]) -> Iterator[tuple[str, Any, str]]:
    ddp = model_chunks[0].ddp_config
    model = get_model_config(model_chunks[0])
    for name in ("use_megatron_fsdp", "use_custom_fsdp"):  # the newer and the older name
        yield name, getattr(ddp, name, False), "use the distributed optimizer without FSDP"
    fp4 = getattr(model, "fp4_param", False)
    yield "fp4_param", fp4, "keep parameters in bf16 (computing in it is fine)"
    yield from _fp8_modes(ddp.fp8_param_gather or getattr(model, "fp8_param", False), model)
    yield (
        "moe_single_grouped_weight",
        getattr(model, "moe_single_grouped_weight", False),
        "keep a weight per expert",
    )
    for chunk in model_chunks:
        for name, param in chunk.named_parameters():
            yield (
                "generalized tensor parallelism",
                getattr(param, "is_gtp_weight_remat", False) and name,
                "use tensor parallelism alone",
            )


def _fp8_modes(fp8: bool, model: Any) -> Iterator[tuple[str, Any, str]]:
    """Refuses fp8 parameters but by the recipe whose step is known to be that of one process."""
    yield (
        "fp8_param_gather before core 0.14",
        fp8 and megatron_version()[1] < (0, 14),
        "keep parameters in bf16 (computing in fp8 is fine)",
    )
    recipe = getattr(model.fp8_recipe, "value", model.fp8_recipe)  # an enumeration in some cores
    yield (
        f"fp8_param_gather with fp8_recipe={recipe}",
        fp8 and recipe != "delayed",
        "give fp8_recipe='delayed' or keep parameters in bf16 (computing in fp8 is fine), since by "
        "other recipes a rank scales what it holds of a weight, and such a step has not been shown "
        "to be that of one process",
    )


def _upstream_faults(config: Any, model: Any) -> Iterator[tuple[str, Any, str]]:
    """Combinations that train wrongly in Megatron, with AdamW too."""
    early = config.overlap_param_gather_with_optimizer_step
    yield (
        "overlap_param_gather_with_optimizer_step in fp16",
        early and config.fp16,
        "use overlap_param_gather alone, since Megatron gives each half of the model a loss scale "
        "of its own",
    )
    if not getattr(model, "num_moe_experts", None):
        return
    yield (
        "overlap_param_gather_with_optimizer_step with experts",
        early,
        "use overlap_param_gather alone, since Megatron gathers the first chunk's experts before "
        "their optimizer has stepped",
    )
    alone = model.expert_model_parallel_size == 1
    other_tp = model.expert_tensor_parallel_size != model.tensor_model_parallel_size
    yield (
        "expert_tensor_parallel_size other than tensor_model_parallel_size without expert "
        "parallelism",
        alone and other_tp and model.expert_tensor_parallel_size,
        "set expert_model_parallel_size above 1, since Megatron does not add up the gradients of "
        "such experts over TP ranks",
    )
