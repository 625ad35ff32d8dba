"""Checks before an optimizer is built: options that cannot be, and settings that ranks
compare.

Options that cannot run under Muon have one clear error each, before the first
collective. All ranks compare their settings before anything else, since votes and
exchanges depend on them: ranks that disagree would wait for each other, or raise errors
of Megatron's that name no setting.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config

from megatron_muon.mcore.host.shards import device_of
from megatron_muon.mcore.host.states import try_states
from megatron_muon.mcore.routing.param_routing import weights
from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.planning import agreed
from megatron_muon.runtime.consensus import agree_on_settings
from megatron_muon.settings.config import USE_ADAMW, MuonConfig, named
from megatron_muon.settings.flags import ADAPTIVE

_BY_ROUND = (
    "use optimizer_cpu_offload with use_precision_aware_optimizer, which "
    "moves state by round"
)
# Switches of Megatron's that Muon does not support, by field and flag, and what to do
# instead. No release has those of the last lines: they are of Megatron's branch dev, or
# of a fork.
REFUSED = {
    "optimizer_cuda_graph": "leave it off",
    "use_layer_wise_distributed_optimizer": (
        "delete that line, which asks for Megatron's own Muon"
    ),
    "use_megatron_fsdp": "use the distributed optimizer without FSDP",
    "use_custom_fsdp": "use the distributed optimizer without FSDP",
    "fp4_param": "keep parameters in bf16 (computing in fp4 is fine)",
    "moe_single_grouped_weight": "keep a weight per expert",
    # else it would look like a matrix
    "moe_single_grouped_bias": "keep a bias per expert",
    "offload_optimizer_states": _BY_ROUND,
    "chunked_optimizer_state_offload": _BY_ROUND,
    "low_memory_resume": (
        "leave it off: it moves only AdamW's state to the host while it loads"
    ),
    "head_wise_attn_gate": "use attention_output_gate, whose rows are known",
    "use_engram": "leave it off, since its embeddings have an optimizer of their own",
    "enable_hetero": "give all ranks one parallelism",
    "use_dualpipev": "use an interleaved pipeline",
}
_FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
# Dtypes of states in host memory, as flags and as torch's names.
_FP32 = {"fp32", "float32"}
_IN_HOST_MEMORY = {
    "main_params_dtype": _FP32,
    "exp_avg_dtype": _FP32 | {"bf16", "bfloat16"},
}
_ONE = "use only one of the two"
# Reads one of Megatron's settings by its field's name; None where there is no such.
Read = Callable[[str], Any]
# Modes that Muon does not support: each one's name, its value (refused if true), and a
# way out.
Modes = Iterable[tuple[str, Any, str]]


def refuse_unsupported(optimizer_config: Any, model_chunks: Sequence[Any]) -> None:
    """Check the options of a run that asks for ``optimizer='muon'``.

    Raises:
        ValueError: an option contradicts Distributed Muon, or would be ignored.
        NotImplementedError: a mode that Muon does not have yet. Names the option and
            the way out, and every further one.
    """
    raise_all(_unsupported(optimizer_config, model_chunks))


def raise_all(faults: Iterable[Exception]) -> None:
    """Raise faults as one error: of the first one's type, with the texts of all."""
    found = list(faults)
    if found:
        raise type(found[0])("\n".join(dict.fromkeys(map(str, found))))


def _unsupported(
    optimizer_config: Any, model_chunks: Sequence[Any]
) -> Iterator[Exception]:
    ddp_configs = [
        chunk.ddp_config for chunk in model_chunks if hasattr(chunk, "ddp_config")
    ]
    for config in (optimizer_config, *ddp_configs):
        if not config.use_distributed_optimizer:
            yield ValueError(
                "optimizer='muon' shards over Megatron's distributed optimizer, but "
                f"{type(config).__name__}.use_distributed_optimizer is False: set it "
                "in OptimizerConfig and DistributedDataParallelConfig before the model "
                "is wrapped (--use-distributed-optimizer; a framework may clear it for "
                f"Megatron's own Muon), or {USE_ADAMW}"
            )
    # a choice since core 0.15
    if not getattr(optimizer_config, "decoupled_weight_decay", True):
        yield ValueError(
            "optimizer='muon' decays weights as AdamW does: set "
            f"decoupled_weight_decay=True, or {USE_ADAMW} for L2 regularization"
        )
    configs = (optimizer_config, *ddp_configs, get_model_config(model_chunks[0]))

    def read(name: str) -> Any:
        values = (getattr(config, name, None) for config in configs)
        return next(filter(None, values), None)

    modes = chain(refused_modes(read), _modes_of_built(read, model_chunks))
    for option, value, way_out in modes:
        if value:
            yield NotImplementedError(
                f"optimizer='muon' does not support {option} yet (got {value!r}): "
                f"{way_out}, or {USE_ADAMW}"
            )
    for chunk in model_chunks:
        if not isinstance(chunk, DistributedDataParallel):
            yield NotImplementedError(
                f"optimizer='muon' does not support {type(chunk).__name__} yet: wrap "
                f"model chunks in Megatron's DistributedDataParallel, or {USE_ADAMW}"
            )


def refused_modes(read: Read) -> Modes:
    """Modes that Muon does not support, as far as settings say."""
    for name, way_out in REFUSED.items():
        yield name, read(name), way_out
    yield from _fp8_modes(read)
    yield from _state_modes(read)
    yield from _upstream_faults(read)


def _modes_of_built(read: Read, model_chunks: Sequence[Any]) -> Modes:
    """What only a built model or config shows."""
    params: list[tuple[str, torch.nn.Parameter]] = []
    for chunk in model_chunks:
        params += chunk.named_parameters()
    marked = [name for name, x in params if getattr(x, "is_gtp_weight_remat", False)]
    wide = [name for name, x in params if x.dtype == torch.float32 and x.requires_grad]
    way_out = "use tensor parallelism alone"
    yield "generalized tensor parallelism", marked[:1], way_out
    if read("optimizer_cpu_offload"):
        way_out = "keep them in 16 bits"
        yield "optimizer_cpu_offload with fp32 weights", wide[:1], way_out


def refuse(config: MuonConfig, arguments: Mapping[str, Any]) -> None:
    """Check a call of ``get_megatron_optimizer`` for Muon, by what one pipeline stage
    knows.
    """
    model_chunks = arguments["model_chunks"]
    raise_all(
        chain(
            _unsupported(arguments["config"], model_chunks),
            _faults_of_call(config, arguments["config"], arguments),
            _frozen_too_late(model_chunks),
        )
    )


def _faults_of_call(
    config: MuonConfig, optimizer_config: Any, arguments: Mapping[str, Any]
) -> Iterator[Exception]:
    adaptive = list(fields_set(optimizer_config, "adaptive_muon_"))
    if optimizer_config.optimizer == "adaptive_muon":
        adaptive.insert(0, "optimizer='adaptive_muon'")
    if adaptive:
        yield ValueError(f"OptimizerConfig.{', '.join(adaptive)}: {ADAPTIVE}")
    if config.clip_scope != "all" and not optimizer_config.clip_grad > 0.0:
        yield ValueError(
            f"{named('clip_scope')} {config.clip_scope!r} with clip_grad "
            f"{optimizer_config.clip_grad}: nothing is clipped; set clip_grad "
            "(--clip-grad), or leave the scope at 'all'"
        )
    if config.full_period > 1:
        model = get_model_config(arguments["model_chunks"][0])
        sizes = model.tensor_model_parallel_size, model.expert_tensor_parallel_size
        yield from unsliced(config, max(size or 1 for size in sizes))
        if optimizer_config.optimizer_cpu_offload:
            yield NotImplementedError(
                f"{named('full_period')} with optimizer_cpu_offload: state comes from "
                f"the host in the rounds of full steps; {_ONE}"
            )
    narrow = optimizer_config.use_precision_aware_optimizer
    if narrow and config.momentum_dtype != "fp32":
        yield ValueError(
            f"{named('momentum_dtype')} {config.momentum_dtype!r} with "
            "use_precision_aware_optimizer: set the momentum's dtype by exp_avg_dtype "
            "there"
        )
    if narrow and not optimizer_config.optimizer_cpu_offload:
        try:
            try_states(optimizer_config, device_of(arguments["model_chunks"]))
        except RuntimeError as error:
            yield NotImplementedError(
                "optimizer='muon' does not support use_precision_aware_optimizer here: "
                f"{error}; install a Transformer Engine whose FusedAdam has these "
                "dtypes (1.13 or newer, for bf16 2.3), or leave it off"
            )
    # of core 0.14: without a group of a stage
    for name in ("grad_comm_pgs", "model_comm_pgs"):
        if arguments.get(name) is not None:
            yield NotImplementedError(
                f"optimizer='muon' does not support {name}: leave it out to use "
                "Megatron's global groups, or take a Megatron from 0.15 on and pass "
                "pg_collection"
            )


def unsliced(config: MuonConfig, tp_size: int) -> Iterator[ValueError]:
    """Refuse block steps where TP cuts nothing."""
    if config.full_period > 1 and tp_size == 1:
        yield ValueError(
            f"{named('full_period')} {config.full_period}: with TP 1 there are no "
            "slices, so every step is full; leave it out"
        )


def _frozen_too_late(model_chunks: Sequence[Any]) -> Iterator[Exception]:
    """Refuse a weight that was frozen once it had a place in DDP's gradient buffers.

    Megatron's DistributedOptimizer would look for it among the parameters that train.
    """
    placed: set[torch.nn.Parameter] = set()
    for chunk in model_chunks:
        if isinstance(chunk, DistributedDataParallel):
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                placed.update(buffer.param_index_map)
    for weight in weights(model_chunks):
        if not weight.param.requires_grad and weight.param in placed:
            yield ValueError(
                f"{weight.name} was frozen after DistributedDataParallel had allocated "
                "its gradient: freeze parameters before wrapping the model"
            )
            return


def own_muons_fields(optimizer_config: Any, prefix: str = "muon_") -> dict[str, Any]:
    """Fields of Megatron's own Muon, with that core's defaults."""
    return {
        field.name: field.default
        for field in dataclasses.fields(optimizer_config)
        if field.name.startswith(prefix)
    }


def fields_set(optimizer_config: Any, prefix: str = "muon_") -> dict[str, Any]:
    """Fields of Megatron's own Muon that are unlike that core's defaults."""
    defaults = own_muons_fields(optimizer_config, prefix)
    values = {name: getattr(optimizer_config, name) for name in defaults}
    return {name: it for name, it in values.items() if it != defaults[name]}


def routes(arguments: Mapping[str, Any]) -> list[str]:
    """The optimizers that ``config_overrides`` (since core 0.16) name."""
    overrides = (arguments.get("config_overrides") or {}).values()
    return [override["optimizer"] for override in overrides if "optimizer" in override]


def _fp8_modes(read: Read) -> Modes:
    """Refuse fp8 parameters, except by recipes whose step was compared with that of one
    process.
    """
    if not (read("fp8_param_gather") or read("fp8_param")):
        return ()
    version = megatron_version()[1]
    bf16 = "keep parameters in bf16 (computing in fp8 is fine)"
    # some cores' is of an enum
    recipe = getattr(read("fp8_recipe"), "value", read("fp8_recipe"))
    is_mxfp8 = recipe == "mxfp8"
    return (
        ("fp8_param_gather before core 0.14", version < (0, 14), bf16),
        (
            f"fp8_param_gather with fp8_recipe={recipe}",
            recipe not in _FP8_RECIPES,
            f"give one of {', '.join(_FP8_RECIPES)}, or {bf16}",
        ),
        (
            "fp8_param_gather with fp8_recipe=mxfp8 before core 0.19",
            is_mxfp8 and version < (0, 19),
            f"{bf16}, since Megatron then has weights of other places, or gathers "
            "experts' too early",
        ),
        (
            "fp8_recipe=mxfp8 with fp8_param_gather and without "
            "reuse_grad_buf_for_mxfp8_param_ag",
            is_mxfp8 and not read("reuse_grad_buf_for_mxfp8_param_ag"),
            f"set it (--reuse-grad-buf-for-mxfp8-param-ag), or {bf16}",
        ),
    )


def _state_modes(read: Read) -> Modes:
    """Refuse what FusedAdam can and Muon cannot do with states in other dtypes."""
    fp8 = read("fp8_param_gather") or read("fp8_param")
    on = read("use_precision_aware_optimizer")
    yield "use_precision_aware_optimizer with fp8_param_gather", on and fp8, _ONE
    if not read("optimizer_cpu_offload"):
        return
    yield (
        "optimizer_cpu_offload without use_precision_aware_optimizer",
        not on,
        "set it (--use-precision-aware-optimizer), as Megatron-LM's own flags want",
    )
    for name, dtypes in _IN_HOST_MEMORY.items():
        dtype = read(name)
        yield (
            f"optimizer_cpu_offload with {name}={dtype}",
            on and dtype and str(dtype).removeprefix("torch.") not in dtypes,
            f"give {' or '.join(sorted(dtypes & {'fp32', 'bf16'}, reverse=True))}",
        )


def _upstream_faults(read: Read) -> Modes:
    """Combinations that train wrongly in Megatron, with AdamW too."""
    early = read("overlap_param_gather_with_optimizer_step")
    narrow = read("use_precision_aware_optimizer")
    has_experts = read("num_moe_experts")
    has_ep = read("expert_model_parallel_size") != 1
    tp = read("tensor_model_parallel_size")
    expert_tp = read("expert_tensor_parallel_size")
    return (
        (
            "overlap_param_gather_with_optimizer_step in fp16",
            early and read("fp16"),
            "use overlap_param_gather alone, since Megatron gives each half of the "
            "model a loss scale of its own",
        ),
        (
            "use_precision_aware_optimizer with rl_offload_optimizer_during_inference",
            narrow and read("rl_offload_optimizer_during_inference"),
            f"{_ONE}, since Megatron then parts the optimizer's shards from the "
            "weights",
        ),
        (
            "overlap_param_gather_with_optimizer_step with experts",
            has_experts and early,
            "use overlap_param_gather alone, since Megatron gathers the first chunk's "
            "experts before their optimizer has stepped",
        ),
        (
            "expert_tensor_parallel_size other than tensor_model_parallel_size without "
            "expert parallelism",
            has_experts and not has_ep and expert_tp != tp and expert_tp,
            "set expert_model_parallel_size above 1, since Megatron does not add up "
            "the gradients of such experts over TP ranks",
        ),
    )


# A bucket's size may come from the parameters of a stage; a rank may log into a folder
# of its own.
_MAY_DIFFER = ("optimizer", "bucket_size", "config_logger_dir")
_OF_MODEL = ("qk_clip", "qk_clip_threshold", "qk_clip_alpha", "log_max_attention_logit")


def agree(config: MuonConfig, arguments: Mapping[str, Any], *, asks: bool) -> None:
    """Compare the settings of all ranks: the plugin's, and Megatron's for the
    optimizer.

    ``asks`` and errors: see ``agree_on_settings``.
    """
    optimizer_config, model_chunks = arguments["config"], arguments["model_chunks"]
    chunk = model_chunks[0]
    lines = agreed.run_lines(config, optimizer_config.optimizer, megatron_version()[0])
    lines += _fields("OptimizerConfig", optimizer_config)
    if hasattr(chunk, "ddp_config"):
        lines += _fields("DistributedDataParallelConfig", chunk.ddp_config)
    model = get_model_config(chunk)
    lines.append(f"optimizers of config_overrides: {routes(arguments)!r}")
    lines += [
        f"{name} of the model: {getattr(model, name, None)!r}" for name in _OF_MODEL
    ]
    agree_on_settings(lines, asks=asks)


_PLAIN = (bool, int, float, str, tuple, list, torch.dtype, enum.Enum, type(None))


def _fields(name: str, config: Any) -> Iterator[str]:
    """The fields of a configuration; of objects that have no plain value, only the
    type.
    """
    for field in dataclasses.fields(config):
        if field.name not in _MAY_DIFFER:
            value = getattr(config, field.name)
            text = repr(value) if isinstance(value, _PLAIN) else type(value).__name__
            yield f"{name}.{field.name}: {text}"
