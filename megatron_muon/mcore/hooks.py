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

SUPPORTED_MEGATRON_CORE = ("0.16.1",)


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
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    relied_on: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


HOOKS = (
    Hook(
        "megatron.core.optimizer",
        "_get_param_groups",
        ("model_chunks", "config", "config_overrides"),
        "called by get_megatron_optimizer before its first collective, with the overrides that "
        "hold wd_mult = 0; wrapped for the checks and for weight_decay_all_params",
    ),
    Hook(
        "megatron.core.optimizer",
        "_get_megatron_optimizer_based_on_param_groups",
        ("config", "model_chunks", "param_groups", "per_model_buffers", "pg_collection"),
        "builds one DistributedOptimizer around Adam; wrapped to make that one Muon's",
    ),
    Hook(
        "megatron.core.optimizer",
        "get_standard_config_overrides",
        ("config",),
        "the overrides that Megatron uses where it is given none",
    ),
    Hook(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.prepare_grads",
        ("self",),
        "called on every rank once gradients are reduced, before any optimizer of the chain steps; "
        "copies them to the shards and divides by the loss scale",
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
        "megatron.core.parallel_state",
        "get_tensor_and_data_parallel_group",
        ("with_context_parallel",),
        "the ranks of a pipeline stage",
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
    "tp_group": "set by the factory after construction",
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


def check_hooks() -> None:
    """Compare the table with the installed megatron-core.

    Raises:
        SeamError: names the version or the symbol, and the way out.
    """
    version = importlib.import_module("megatron.core").__version__
    if version not in SUPPORTED_MEGATRON_CORE:
        raise SeamError(
            f"megatron-core {version} is installed; this megatron_muon was tested with "
            f"{', '.join(SUPPORTED_MEGATRON_CORE)}: install that, or a megatron_muon that lists "
            f"{version}"
        )
    for hook in HOOKS:
        _check(hook, version)


def _check(hook: Hook, version: str) -> None:
    symbol: object = importlib.import_module(hook.module)
    for part in hook.name.split("."):
        symbol = getattr(symbol, part, None)
        if symbol is None:
            raise SeamError(
                f"megatron-core {version} has no {hook}, which megatron_muon needs: "
                f"{hook.relied_on}"
            )
    assert callable(symbol)
    found = inspect.signature(symbol).parameters
    missing = [name for name in hook.parameters if name not in found]
    if missing:
        raise SeamError(
            f"{hook} of megatron-core {version} has no parameter {', '.join(missing)}, which "
            f"megatron_muon needs: {hook.relied_on}"
        )
