"""Putting the plugin into Megatron, and taking it out."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import optimizer as mcore_optimizer

from megatron_muon.config import MuonConfig
from megatron_muon.mcore.build import make_muons
from megatron_muon.mcore.distributed_optimizer import MuonDistributedOptimizer
from megatron_muon.mcore.integrity import save_load
from megatron_muon.mcore.params import bucket_layout
from megatron_muon.mcore.params.validate import frozen_too_late, refuse_groups, refuse_unsupported
from megatron_muon.mcore.seams.rows import SeamError, check_hooks, megatron_version, seams_of
from megatron_muon.mcore.shards import device_of
from megatron_muon.runtime.consensus import together
from megatron_muon.runtime.exchange import Meter
from megatron_muon.runtime.patches import Patches, around

# A module that imported a wrapped name where it is not searched for keeps our wrapper after
# uninstall(); the wrapper then only passes the call on.
_patches = Patches()
_originals: dict[str, Any] = {}  # Megatron's own functions
_config: MuonConfig | None = None  # None while not installed


def install(config: MuonConfig | None = None) -> None:
    """Make ``optimizer='muon'`` mean Distributed Muon in the installed Megatron.

    Modules that have imported ``get_megatron_optimizer`` by name get the plugin's, too. Idempotent;
    a later call with a config replaces the settings of optimizers built from then on.

    Args:
        config: the settings; Moonlight's where None on the first call.

    Raises:
        SeamError: the installed Megatron is not one that the plugin knows.
        TypeError: ``config`` is not a MuonConfig.
        NotImplementedError: ``align_shards`` with a Megatron that takes no layout.
    """
    global _config
    if config is not None and not isinstance(config, MuonConfig):
        raise TypeError(f"install takes a MuonConfig, got {config!r}")
    if _config is None:
        check_hooks()
    wanted = config or _config or MuonConfig()
    if wanted.align_shards:
        bucket_layout.put_in(wanted)
    else:
        bucket_layout.take_out()
    if _config is None:
        _wrap()
    _config = wanted


def _wrap() -> None:
    for seam in seams_of(megatron_version()[1], "core"):
        if seam.name in _WRAPPERS:
            original = getattr(importlib.import_module(seam.module), seam.name)
            ours = around(original, _WRAPPERS[seam.name], _is_installed)
            _originals[seam.name] = original
            _patches.everywhere(seam.name, original, ours)


def uninstall() -> None:
    """Give Megatron its own functions back, and leave no trace in its modules and classes.

    Optimizers already built stay as they are.
    """
    global _config
    bucket_layout.take_out()
    _patches.undo()
    _config = None


def _is_installed() -> bool:
    return _config is not None


def meter(optimizer: Any) -> Meter:
    """Counts of this rank's work for Muon in the last step.

    Args:
        optimizer: the result of ``get_megatron_optimizer`` for ``optimizer='muon'``.

    Raises:
        TypeError: it is not Muon's.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    muons = [part.muon for part in parts if isinstance(part, MuonDistributedOptimizer)]
    if not muons:
        raise TypeError(f"{type(optimizer).__name__} has no Muon part to meter")
    meters = [muon.meter for muon in muons if muon is not None] or [Meter()]
    return Meter(
        steps=max(m.steps for m in meters),
        matrices=sum(m.matrices for m in meters),
        ns_flops=sum(m.ns_flops for m in meters),
        gather_bytes=sum(m.gather_bytes for m in meters),
        scatter_bytes=sum(m.scatter_bytes for m in meters),
    )


def _get_megatron_optimizer(
    original: Callable[..., Any], config: Any, model_chunks: list[Any], *args: Any, **kwargs: Any
) -> Any:
    """Wraps Megatron's: lets it build its AdamW distributed optimizers, then makes those Muon's.

    With ``weight_decay_all_params`` AdamW itself spares no weight, too; else it is Megatron's.
    """
    assert _config is not None
    twin = config.optimizer == "adam" and _config.weight_decay_all_params
    if config.optimizer.lower() != "muon" and not twin:
        return original(config, model_chunks, *args, **kwargs)
    given = inspect.signature(original).bind(config, model_chunks, *args, **kwargs)
    if twin:
        _decay_everything(given, config)
        return original(*given.args, **given.kwargs)
    if config.optimizer != "muon":
        raise ValueError(f"write optimizer='muon', got {config.optimizer!r}")
    together(lambda: _refuse(config, model_chunks, given), None, device_of(model_chunks))
    if _config.weight_decay_all_params:
        _decay_everything(given, config)
    with _asking_for_adam(config):
        optimizer = original(*given.args, **given.kwargs)
    make_muons(optimizer, model_chunks, _config, given.arguments.get("pg_collection"))
    return optimizer


def _refuse(config: Any, model_chunks: list[Any], given: inspect.BoundArguments) -> None:
    """Raise for options that Muon cannot have, also those that only one pipeline stage has."""
    refuse_unsupported(config, model_chunks)
    refuse_groups(given.arguments)
    frozen = frozen_too_late(model_chunks)
    if frozen is not None:
        raise frozen


def _get_megatron_muon_optimizer(
    original: Callable[..., Any], config: Any, model_chunks: list[Any], *args: Any, **kwargs: Any
) -> Any:
    """Wraps what cores 0.16 and 0.17 have for the name muon, and Megatron-Bridge calls there."""
    if config.optimizer != "muon":
        return original(config, model_chunks, *args, **kwargs)
    given = inspect.signature(original).bind(config, model_chunks, *args, **kwargs).arguments
    if given.pop("layer_wise_distributed_optimizer", False):
        raise ValueError(
            "layer_wise_distributed_optimizer=True asks for Megatron's own Muon, but "
            "megatron_muon.install() has made optimizer='muon' the plugin's: leave out one of both"
        )
    return _get_megatron_optimizer(_originals["get_megatron_optimizer"], **given)


def _stopped(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps what Megatron's own function calls: with ``muon`` only a reference to it that somebody
    took before ``install()`` gets here."""
    if config.optimizer == "muon":
        raise SeamError(
            "optimizer='muon' was asked of a get_megatron_optimizer that was taken before "
            "megatron_muon.install(): call megatron.core.optimizer.get_megatron_optimizer"
        )
    return original(config, *args, **kwargs)


# Of the rows that are wrapped, by name; those for ``align_shards`` are ``bucket_layout``'s. They
# take Megatron's function first, and are called while the plugin is installed.
_WRAPPERS: dict[str, Callable[..., Any]] = {
    "get_megatron_optimizer": _get_megatron_optimizer,
    "get_megatron_muon_optimizer": _get_megatron_muon_optimizer,
    "_get_megatron_optimizer_based_on_param_groups": _stopped,
    "_get_megatron_emerging_optimizer": _stopped,
    "save": save_load.save,
    "load": save_load.load,
}


@contextmanager
def _asking_for_adam(config: Any) -> Iterator[None]:
    """The config object itself must be kept: Megatron compares and updates it later."""
    config.optimizer = "adam"
    try:
        yield
    finally:
        config.optimizer = "muon"


def _decay_everything(given: inspect.BoundArguments, config: Any) -> None:
    """Change the arguments of Megatron's ``get_megatron_optimizer`` so that no weight is spared."""
    if "no_weight_decay_cond" in given.signature.parameters:  # before core 0.16
        given.arguments["no_weight_decay_cond"] = _never
        return
    overrides = given.arguments.get("config_overrides")
    if overrides is None:
        overrides = mcore_optimizer.get_standard_config_overrides(config=config)
    kept = {
        key: {name: value for name, value in override.items() if (name, value) != ("wd_mult", 0.0)}
        for key, override in overrides.items()
    }
    given.arguments["config_overrides"] = {key: over for key, over in kept.items() if over}


def _never(name: str, param: Any) -> bool:
    return False
