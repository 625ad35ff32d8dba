"""The Megatron symbols that the plugin relies on, and what it relies on them for.

Read this to know what a Megatron upgrade can break. ``check_hooks`` compares it with the installed
megatron-core and stops with the symbol's name where they differ.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass

SUPPORTED_MEGATRON_CORE = ((0, 16),)


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
        "DistributedOptimizer.step_with_ready_grads",
        ("self",),
        "called on every rank once gradients are reduced, unscaled and clipped; calls the inner "
        "optimizer's step, copies main to model parameters and starts the all-gather",
    ),
    Hook(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._get_model_param_range_map",
        ("self", "param"),
        "['param'] is the local piece of a parameter, in elements of it",
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
)


def check_hooks() -> None:
    """Compare the table with the installed megatron-core.

    Raises:
        SeamError: names the version or the symbol, and the way out.
    """
    version = importlib.import_module("megatron.core").__version__
    release = tuple(int(part) for part in version.split(".")[:2])
    if release not in SUPPORTED_MEGATRON_CORE:
        wanted = ", ".join(".".join(map(str, supported)) for supported in SUPPORTED_MEGATRON_CORE)
        raise SeamError(
            f"megatron-core {version} is installed; megatron_muon supports {wanted}.x: install "
            "one of those, or a megatron_muon that lists this one"
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
