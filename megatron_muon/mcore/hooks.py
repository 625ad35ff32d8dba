"""The Megatron symbols that the plugin relies on, and what it relies on them for.

Read this to know what a Megatron upgrade can break. ``check_hooks`` compares the functions with the
installed megatron-core, ``check_built`` the attributes with an optimizer that it has built; both
stop with the symbol's name where they differ.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

# Minor versions of megatron-core, 0.x, that the plugin was tested with; 20 is main's.
OLDEST, NEWEST = (0, 12), (0, 20)
Version = tuple[int, int]


_WAY_OUT = (
    "If this Megatron is a fork's, give it the symbol that the release of its version has; else "
    "take a megatron_muon that knows it, or choose optimizer='adam'"
)


class SeamError(RuntimeError):
    """The installed Megatron lacks a symbol that the plugin hooks, or has another shape of it."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A symbol of Megatron.

    Attributes:
        module: where it is looked up at call time.
        name: of the symbol, with a dot for a class's attribute.
        parameters: those that must be in its signature.
        relied_on: what the plugin needs it to do.
        since, until: the first and the last minor version that has it in this shape.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    relied_on: str
    since: Version = OLDEST
    until: Version = NEWEST

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


HOOKS = (
    Hook(
        "megatron.core.optimizer",
        "get_megatron_optimizer",
        ("config", "model_chunks", "no_weight_decay_cond"),
        "builds a ChainedOptimizer of DistributedOptimizers around Adam; wrapped to make those "
        "Muon's. no_weight_decay_cond says what is not decayed",
        until=(0, 15),
    ),
    Hook(
        "megatron.core.optimizer",
        "get_megatron_optimizer",
        ("config", "model_chunks", "config_overrides", "pg_collection"),
        "builds a ChainedOptimizer of DistributedOptimizers around Adam; wrapped to make those "
        "Muon's. config_overrides holds wd_mult = 0 for what is not decayed",
        since=(0, 16),
    ),
    Hook(
        "megatron.core.optimizer",
        "get_standard_config_overrides",
        ("config",),
        "the overrides that Megatron uses where it is given none",
        since=(0, 16),
    ),
    Hook(
        "megatron.core.optimizer",
        "_get_megatron_optimizer_based_on_param_groups",
        ("config",),
        "what a get_megatron_optimizer that was taken before install() calls: stopped there",
    ),
    Hook(
        "megatron.core.optimizer",
        "_get_megatron_emerging_optimizer",
        ("config",),
        "what such a one calls for the name muon, Megatron's own: stopped there",
        since=(0, 18),
    ),
    Hook(
        "megatron.core.optimizer.muon",
        "get_megatron_muon_optimizer",
        ("config", "model_chunks", "layer_wise_distributed_optimizer", "pg_collection"),
        "what callers take for the name muon in these cores, Megatron's own Muon; wrapped to be "
        "the plugin's",
        since=(0, 16),
        until=(0, 17),
    ),
    Hook(
        "megatron.core.optimizer",
        "ChainedOptimizer.prepare_grads",
        ("self",),
        "called on every rank once gradients are reduced, before any optimizer of the chain steps; "
        "each of its chained_optimizers copies them to its shards and divides by the loss scale",
    ),
    Hook(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.step_with_ready_grads",
        ("self",),
        "called on every rank once gradients are prepared and clipped; calls the inner optimizer's "
        "step, copies main to model parameters and starts the all-gather",
    ),
    Hook(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.get_grad_stats_parallel_group",
        ("self",),
        "the ranks that skip or take a step together: all stages of one optimizer instance",
    ),
    Hook(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.get_parameters",
        ("self",),
        "the flat fp32 shards that the inner optimizer updates",
    ),
    Hook(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._build_model_gbuf_range",
        ("param_and_grad_buffer", "bucket_index"),
        "cuts each bucket into equal shards, one per DP rank, as layout.Parameter.pieces does",
    ),
    Hook(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._compute_per_buffer_param_layout",
        ("params", "bucket_size", "data_parallel_world_size", "ddp_config", "param_indices"),
        "lays out a grad buffer before its model is wrapped; wrapped, with align_shards "
        "(--muon-dp-layout), to order the parameters of each bucket",
        since=(0, 18),
    ),
    Hook(
        "megatron.core.distributed",
        "DistributedDataParallel.__init__",
        ("module", "pg_collection", "full_param_layout"),
        "takes the layouts or makes them; wrapped, with align_shards (--muon-dp-layout), to order "
        "them by its model",
        since=(0, 18),
    ),
    Hook(
        "megatron.core.dist_checkpointing",
        "save",
        ("sharded_state_dict", "checkpoint_dir"),
        "writes a torch_dist checkpoint, or returns the AsyncRequest that will, whose finalize_fns "
        "are called in order on every rank; wrapped to make the digest",
    ),
    Hook(
        "megatron.core.dist_checkpointing",
        "load",
        ("sharded_state_dict", "checkpoint_dir"),
        "reads one on every rank; wrapped to check the digest",
    ),
    Hook(
        "megatron.core.parallel_state",
        "get_tensor_and_data_parallel_group",
        ("with_context_parallel",),
        "the ranks of a pipeline stage",
    ),
    Hook(
        "megatron.core.parallel_state",
        "get_tensor_model_parallel_group",
        (),
        "the ranks that share a dense weight",
    ),
    Hook(
        "megatron.core.parallel_state",
        "get_expert_tensor_parallel_group",
        (),
        "the ranks that share an expert's weights",
    ),
    Hook(
        "megatron.core.parallel_state",
        "get_expert_model_parallel_group",
        (),
        "the ranks that a layer's experts are spread over",
    ),
)


# Of a DistributedOptimizer: what each attribute is relied on for.
ATTRIBUTES = {
    "model_chunks": "the DDP-wrapped modules, for names and marks of parameters",
    "is_stub_optimizer": "True on a rank that has no parameter groups and never steps",
    "config": "its timers, and what the run asks for",
    "grad_scaler": "None, or the loss scaler, which dense and experts' optimizers come to share",
    "distributed_optimizer_instance_id": "which of several instances this rank is in",
}
# And of one that is no stub.
BUILT_ATTRIBUTES = {
    "optimizer": "the inner Adam: its param_groups hold flat shards, its state is ours to fill",
    "init_state_fn": "called with the inner optimizer to fill its state before a load",
    "data_parallel_group": "the ranks that each bucket is cut over",
    "buffers": "each with param_index_map (start, stop, bucket) and buckets (offset, grad_data)",
    "model_float16_groups": "parameters in step with shard_fp32_from_float16_groups",
    "shard_fp32_from_float16_groups": "their flat fp32 main parameters",
    "model_fp32_groups": "parameters in step with shard_fp32_groups",
    "shard_fp32_groups": "flat views of them",
}


def check_built(dist_opt: Any) -> None:
    """Compare the attributes with a DistributedOptimizer that Megatron has built.

    Raises:
        SeamError: names the attribute.
    """
    attributes = dict(ATTRIBUTES)
    if not getattr(dist_opt, "is_stub_optimizer", False):
        attributes |= BUILT_ATTRIBUTES
    for name, relied_on in attributes.items():
        if not hasattr(dist_opt, name):
            version = importlib.import_module("megatron.core").__version__
            raise SeamError(
                f"{type(dist_opt).__name__} of megatron-core {version} has no {name}, which "
                f"megatron_muon needs: {relied_on}"
            )


def megatron_version() -> tuple[str, Version]:
    """The installed megatron-core's version, as it is and as two numbers."""
    text = str(importlib.import_module("megatron.core").__version__)
    major, minor = text.split(".")[:2]
    return text, (int(major), int(minor))


def hooks_of(version: Version) -> list[Hook]:
    """Those that a version of megatron-core has."""
    return [hook for hook in HOOKS if hook.since <= version <= hook.until]


def check_hooks() -> None:
    """Compare the table with the installed megatron-core.

    Raises:
        SeamError: names the version or the symbol, and the way out.
    """
    text, version = megatron_version()
    if not OLDEST <= version <= NEWEST:
        raise SeamError(
            f"megatron-core {text} is installed; this megatron_muon was tested with "
            f"{_text(OLDEST)} to {_text(NEWEST)}: install one of those, or a megatron_muon that "
            f"knows {text}"
        )
    for hook in hooks_of(version):
        check_hook(hook, text)


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def check_hook(hook: Hook, version: str) -> None:
    """Compare a hook with the installed megatron-core.

    Raises:
        SeamError: names it and the way out.
    """
    symbol: object = importlib.import_module(hook.module)
    for part in hook.name.split("."):
        symbol = getattr(symbol, part, None)
        if symbol is None:
            raise SeamError(
                f"megatron-core {version} has no {hook}, which megatron_muon needs: "
                f"{hook.relied_on}. {_WAY_OUT}"
            )
    assert callable(symbol)
    found = inspect.signature(symbol).parameters
    missing = [name for name in hook.parameters if name not in found]
    if missing:
        raise SeamError(
            f"{hook} of megatron-core {version} has no parameter {', '.join(missing)}, which "
            f"megatron_muon needs: {hook.relied_on}. {_WAY_OUT}"
        )
