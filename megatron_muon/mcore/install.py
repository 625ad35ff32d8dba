"""Putting the plugin into Megatron, and taking it out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import optimizer as mcore_optimizer

from megatron_muon.agreement import raise_together
from megatron_muon.config import MuonConfig
from megatron_muon.exchange import Meter
from megatron_muon.mcore.build import make_muons
from megatron_muon.mcore.distributed_optimizer import MuonDistributedOptimizer, device_of
from megatron_muon.mcore.hooks import check_hooks
from megatron_muon.mcore.supported import frozen_too_late, refuse_unsupported

# Megatron's own functions, kept after uninstall() too: a module that took a hooked name by import
# meanwhile goes on calling ours, which then only pass the call on.
_originals: dict[str, Any] = {}
_config: MuonConfig | None = None  # None while not installed


def install(config: MuonConfig | None = None) -> None:
    """Make ``optimizer='muon'`` mean Distributed Muon in the installed Megatron.

    Both hooks are looked up by Megatron when it builds an optimizer, so it does not matter who has
    imported ``get_megatron_optimizer`` before. Idempotent; a later call with a config replaces the
    settings of optimizers built from then on.

    Args:
        config: the settings; Moonlight's where None on the first call.

    Raises:
        SeamError: the installed Megatron is not one that the plugin knows.
        TypeError: ``config`` is not a MuonConfig.
    """
    global _config
    if config is not None and not isinstance(config, MuonConfig):
        raise TypeError(f"install takes a MuonConfig, got {config!r}")
    if _config is None:
        check_hooks()
        for name, wrapper in _WRAPPERS.items():
            _originals[name] = getattr(mcore_optimizer, name)
            setattr(mcore_optimizer, name, wrapper)
    _config = config or _config or MuonConfig()


def uninstall() -> None:
    """Give Megatron its own functions back. Optimizers already built stay as they are."""
    global _config
    if _config is not None:
        for name, original in _originals.items():
            setattr(mcore_optimizer, name, original)
    _config = None


def meter(optimizer: Any) -> Meter:
    """What this rank did for Muon in the last step.

    Args:
        optimizer: what ``get_megatron_optimizer`` returned for ``optimizer='muon'``.

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


def _get_param_groups(
    model_chunks: list[Any], config: Any, config_overrides: dict[Any, Any] | None
) -> Any:
    """Wraps Megatron's: checks first; decays every parameter where the settings say so."""
    if _config is not None and config.optimizer.lower() == "muon":
        if config.optimizer != "muon":
            raise ValueError(f"write optimizer='muon', got {config.optimizer!r}")
        refuse_unsupported(config, model_chunks)
        raise_together(frozen_too_late(model_chunks), None, device_of(model_chunks))
        if _config.weight_decay_all_params:
            config_overrides = _with_weight_decay(config, config_overrides)
    return _originals["_get_param_groups"](model_chunks, config, config_overrides)


def _get_optimizer(config: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps Megatron's: lets it build its AdamW distributed optimizer, then makes that Muon's."""
    original = _originals["_get_megatron_optimizer_based_on_param_groups"]
    if config.optimizer != "muon" or _config is None:
        return original(config, *args, **kwargs)
    with _asking_for_adam(config):
        dist_opt = original(config, *args, **kwargs)
    make_muons(dist_opt, _config, kwargs.get("pg_collection"))
    return dist_opt


_WRAPPERS = {
    "_get_param_groups": _get_param_groups,
    "_get_megatron_optimizer_based_on_param_groups": _get_optimizer,
}


@contextmanager
def _asking_for_adam(config: Any) -> Iterator[None]:
    """The config object itself must be kept: Megatron compares and updates it later."""
    config.optimizer = "adam"
    try:
        yield
    finally:
        config.optimizer = "muon"


def _with_weight_decay(config: Any, overrides: dict[Any, Any] | None) -> dict[Any, Any]:
    if overrides is None:
        overrides = mcore_optimizer.get_standard_config_overrides(config=config)
    kept = {
        key: {name: value for name, value in override.items() if (name, value) != ("wd_mult", 0.0)}
        for key, override in overrides.items()
    }
    return {key: override for key, override in kept.items() if override}
