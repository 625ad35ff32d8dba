"""The Megatron symbols that the plugin relies on, and what it relies on them for.

Read this and ``checkpoint_rows`` to know what a Megatron upgrade can break. ``check_hooks``
compares both with the installed megatron-core, ``check_training_hooks`` the rows of Megatron-LM
with what is imported, ``check_built`` the attributes with an optimizer that Megatron has built; all
stop with the symbol's name where they differ.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

from megatron_muon.mcore.seams.checkpoint_rows import (
    ARGUMENTS,
    ATTRIBUTES,
    CHECKPOINT_HOOKS,
    GROUP_KEYS,
)
from megatron_muon.mcore.seams.row import NEWEST, OLDEST, Attribute, Hook, Version

__all__ = ["HOOKS", "NEWEST", "OLDEST", "Hook", "SeamError", "Version"]
_TRAINING = "megatron.training"

_WAY_OUT = (
    "If this Megatron is a fork's, give it the symbol that the release of its version has; else "
    "take a megatron_muon that knows it, or choose optimizer='adam'"
)


class SeamError(RuntimeError):
    """The installed Megatron lacks a symbol that the plugin hooks, or has another shape of it."""


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
        "ChainedOptimizer.get_grad_norm",
        ("self",),
        "called on every rank once gradients are reduced and copied to the shards of each of its "
        "chained_optimizers, before one of them steps; a float or, where Megatron does not wait "
        "for it, a tensor, the same on all ranks of the grad_stats_parallel_group",
    ),
    Hook(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.get_main_grads_for_grad_norm",
        ("self",),
        "the gradients that the norm is of, without those that other ranks have, too",
        inherited=True,
        until=(0, 18),
    ),
    Hook(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.get_grads_for_grad_norm",
        ("self", "grad_norm_group"),
        "the same; with a group those of parameters that are clipped by a norm of their own",
        inherited=True,
        since=(0, 19),
    ),
    Hook(
        "megatron.core.optimizer",
        "ChainedOptimizer.grads_states_parallel_group_is_shared",
        ("self",),
        "whether all of its chained_optimizers have one norm",
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
        inherited=True,
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
    *CHECKPOINT_HOOKS,
)


def check_built(dist_opt: Any) -> None:
    """Compare the attributes with a DistributedOptimizer that Megatron has built.

    Raises:
        SeamError: names the attribute, or the key of a parameter group.
    """
    is_stub = getattr(dist_opt, "is_stub_optimizer", False)
    for attribute in ATTRIBUTES:
        if attribute.owner == "DistributedOptimizer" and (attribute.of_stubs or not is_stub):
            _require(dist_opt, attribute)
    if is_stub:
        return
    for buffer in dist_opt.buffers:
        for attribute in ATTRIBUTES:
            if attribute.owner == "_ParamAndGradBuffer":
                _require(buffer, attribute)
            elif attribute.owner == "_ParamAndGradBucket":
                _require(buffer.buckets[0], attribute)
    for group in dist_opt.optimizer.param_groups:
        for key, relied_on in GROUP_KEYS.items():
            if key not in group and f"pre_{key}" not in group:
                raise SeamError(
                    f"a parameter group of megatron-core {megatron_version()[0]} has no {key}, "
                    f"which megatron_muon needs: {relied_on}. {_WAY_OUT}"
                )


def _require(built: Any, attribute: Attribute) -> None:
    if not hasattr(built, attribute.name):
        raise SeamError(
            f"{type(built).__name__} of megatron-core {megatron_version()[0]} has no "
            f"{attribute.name}, which megatron_muon needs: {attribute.relied_on}. {_WAY_OUT}"
        )


def check_arguments(args: Any) -> None:
    """Compare Megatron-LM's arguments, once it has checked them, with those that are read.

    Raises:
        SeamError: names the one that is missing.
    """
    for name, relied_on in ARGUMENTS.items():
        if not hasattr(args, name):
            raise SeamError(
                f"the arguments of Megatron-LM of core {megatron_version()[0]} have no {name}, "
                f"which megatron_muon needs: {relied_on}. {_WAY_OUT}"
            )


def megatron_version() -> tuple[str, Version]:
    """The installed megatron-core's version, as it is and as two numbers."""
    text = str(importlib.import_module("megatron.core").__version__)
    major, minor = text.split(".")[:2]
    return text, (int(major), int(minor))


def hooks_of(version: Version) -> list[Hook]:
    """Those that a version of megatron-core has."""
    return [hook for hook in _of(version) if not hook.module.startswith(_TRAINING)]


def training_hooks_of(version: Version) -> list[Hook]:
    """Those that the Megatron-LM of a version has beside its core."""
    return [hook for hook in _of(version) if hook.module.startswith(_TRAINING)]


def _of(version: Version) -> Iterator[Hook]:
    return (hook for hook in HOOKS if hook.since <= version <= hook.until)


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
    for attribute in ATTRIBUTES:
        check_attribute(attribute, text)


def check_training_hooks() -> None:
    """Compare the rows of Megatron-LM with what is imported.

    Raises:
        SeamError: names the symbol, and the way out.
    """
    text, version = megatron_version()
    for hook in training_hooks_of(version):
        check_hook(hook, text)


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def check_hook(hook: Hook, version: str) -> None:
    """Compare a hook with the installed megatron-core.

    Raises:
        SeamError: names it and the way out.
    """
    symbol = _module(hook.module, f"{hook}", hook.relied_on, version)
    for part in hook.name.split("."):
        own = not isinstance(symbol, type) or hook.inherited or part in vars(symbol)
        symbol = getattr(symbol, part, None) if own else None
        if symbol is None:
            raise SeamError(
                f"megatron-core {version} has no {hook}, which megatron_muon needs: "
                f"{hook.relied_on}. {_WAY_OUT}"
            )
    if not hook.parameters:
        return
    found = inspect.signature(symbol).parameters
    missing = [name for name in hook.parameters if name not in found]
    if missing:
        raise SeamError(
            f"{hook} of megatron-core {version} has no parameter {', '.join(missing)}, which "
            f"megatron_muon needs: {hook.relied_on}. {_WAY_OUT}"
        )


def _module(name: str, row: str, relied_on: str, version: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks something that is not Megatron's
        raise SeamError(
            f"megatron-core {version} has no {row}, which megatron_muon needs: {relied_on}. "
            f"{_WAY_OUT}"
        ) from error


def check_attribute(attribute: Attribute, version: str) -> None:
    """See that some method of a class sets an attribute: there is no object of it to ask yet.

    Raises:
        SeamError: names it and the way out.
    """
    module = _module(attribute.module, f"{attribute}", attribute.relied_on, version)
    owner = getattr(module, attribute.owner, None)
    if owner is None or attribute.name not in _attributes_set(owner):
        raise SeamError(
            f"megatron-core {version} has no {attribute}, which megatron_muon needs: "
            f"{attribute.relied_on}. {_WAY_OUT}"
        )


@cache
def _attributes_set(owner: type) -> frozenset[str]:
    """Names that methods of a class of Megatron's, and of those it inherits from, assign to."""
    classes = [each for each in owner.__mro__ if each.__module__.startswith("megatron.")]
    codes = (
        getattr(inspect.unwrap(getattr(member, "__func__", member)), "__code__", None)
        for each in classes
        for member in vars(each).values()
    )
    return frozenset(
        step.argval
        for code in codes
        if code is not None
        for step in dis.get_instructions(code)
        if step.opname == "STORE_ATTR"
    )
