"""Putting the plugin into Megatron, and taking it out."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

from megatron.core import optimizer as mcore_optimizer
from megatron.core.utils import get_model_config

from megatron_muon.mcore import qk_clip
from megatron_muon.mcore.host.loop import host
from megatron_muon.mcore.host.shards import device_of
from megatron_muon.mcore.seams.rows import check_hooks, wrapped_in_core
from megatron_muon.mcore.wiring import start
from megatron_muon.mcore.wiring.build import make_muons
from megatron_muon.mcore.wiring.chained_optimizer import MuonChainedOptimizer
from megatron_muon.mcore.wiring.distributed_optimizer import MuonDistributedOptimizer
from megatron_muon.mcore.wiring.validate import agree, fields_set, refuse, routes
from megatron_muon.presence import SeamError
from megatron_muon.runtime.consensus import together
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.patches import Function, Patches, replaced
from megatron_muon.runtime.tracing import marking
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.flags import MUONS

# A reference to a wrapper that ``undo()`` does not find outlives uninstall(); the
# wrapper then only passes the call on.
_patches = Patches()
_config: MuonConfig | None = None  # None while not installed


def install(config: MuonConfig | None = None) -> None:
    """``megatron_muon.install``, without its check for megatron-core."""
    global _config
    if config is not None and not isinstance(config, MuonConfig):
        raise TypeError(f"install takes a MuonConfig, got {config!r}")
    if _config is None:
        check_hooks()
    wanted = config or _config or MuonConfig()
    if _config is None:
        for seam in wrapped_in_core():
            if seam.name in _WRAPPERS:
                _patches.wrap(seam.module, seam.name, _WRAPPERS[seam.name])
    _config = wanted


def uninstall() -> None:
    """Give Megatron its own functions back, and leave no trace in its modules and
    classes.
    """
    global _config
    _patches.undo()
    start.unusual.clear()
    _config = None


def settings() -> MuonConfig | None:
    """The settings in force; None while not installed."""
    return _config


def meter(optimizer: Any) -> Meter:
    """``megatron_muon.meter``: the sums over the optimizers of a chain."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    muons = [part.muon for part in parts if isinstance(part, MuonDistributedOptimizer)]
    if not muons:
        raise TypeError(f"{type(optimizer).__name__} has no Muon part to meter")
    meters = [muon.meter for muon in muons if muon is not None] or [Meter()]
    sums = {
        field.name: sum(getattr(m, field.name) for m in meters)
        for field in fields(Meter)
    }
    return Meter(**{**sums, "steps": max(m.steps for m in meters)})


def numbers(optimizer: Any) -> dict[str, float]:
    """``megatron_muon.numbers``."""
    if not isinstance(optimizer, MuonChainedOptimizer):
        raise TypeError(f"{type(optimizer).__name__} is not Muon's: it has no numbers")
    return optimizer.numbers()


def _get_megatron_optimizer(
    original: Function,
    config: Any,
    model_chunks: list[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wraps Megatron's: lets it build its AdamW distributed optimizers, then makes them
    Muon's.

    ``optimizer='adam'`` stays Megatron's, but decays every weight with
    ``weight_decay_all_params``. With any of them the distributed optimizer's shards are
    clipped where QK-Clip is asked for.
    """
    assert _config is not None
    settings = _config
    call = inspect.signature(original).bind(config, model_chunks, *args, **kwargs)
    watches = qk_clip.is_wanted(config, model_chunks, settings)
    asks = config.optimizer.lower() in MUONS or _decays_everything(settings, config)
    agree(settings, call.arguments, asks=watches or asks)
    if not watches:
        return _built(original, call, settings)
    # where logits are watched or clipped only
    from megatron_muon.mcore.qk_clip import attach

    pg_collection = call.arguments.get("pg_collection")
    attentions = together(
        lambda: attach.prepare(config, model_chunks, settings, pg_collection),
        None,
        device_of(model_chunks),
    )
    optimizer = _built(original, call, settings)
    attach.attach(attentions, optimizer, model_chunks, settings, pg_collection)
    return optimizer


def _decays_everything(settings: MuonConfig, config: Any) -> bool:
    return config.optimizer in ("adam", *MUONS) and settings.weight_decay_all_params


def _is_muon(config: Any) -> bool:
    """Whether a run asks for the plugin; before core 0.16 Megatron has no
    ``dist_muon``.
    """
    names = MUONS if hasattr(config, "muon_momentum") else MUONS[:1]
    return config.optimizer in names


def _built(
    original: Function, call: inspect.BoundArguments, settings: MuonConfig
) -> Any:
    config = call.arguments["config"]
    model_chunks = call.arguments["model_chunks"]
    is_muon = _is_muon(config)
    if config.optimizer.lower() in MUONS and not is_muon:
        raise ValueError(f"write optimizer='muon', got {config.optimizer!r}")
    if is_muon:
        checks = partial(refuse, settings, call.arguments)
        together(checks, None, device_of(model_chunks))
        settings = _with_upstreams(settings, call)
        if getattr(get_model_config(model_chunks[0]), "use_mup", False):
            _apply_mup(settings, call)
    if _decays_everything(settings, config):
        _decay_everything(call)
    if not is_muon:
        return original(*call.args, **call.kwargs)
    with ExitStack() as stack:
        stack.enter_context(_asking_for_adam(config))
        if settings.lr_mults or settings.wd_mults or settings.by_pattern:
            from megatron_muon.mcore.routing.multipliers import with_multipliers

            ours = with_multipliers(
                mcore_optimizer._get_param_groups,
                settings,
                config.weight_decay,
                call.arguments.get("pg_collection"),
            )
            stack.enter_context(replaced(mcore_optimizer, _get_param_groups=ours))
        optimizer = original(*call.args, **call.kwargs)
    make_muons(optimizer, model_chunks, settings, call.arguments.get("pg_collection"))
    from megatron_muon.mcore.checkpoint.seal import seal_from_now_on  # for Muon only

    seal_from_now_on(settings)
    return optimizer


def _apply_mup(settings: MuonConfig, call: inspect.BoundArguments) -> None:
    """Change the overrides in the arguments so that muP's rates are AdamW's alone."""
    from megatron_muon.mcore.routing.mup import adamws_overrides

    model_chunks = call.arguments["model_chunks"]
    overrides = call.arguments.get("config_overrides") or {}
    groups = call.arguments.get("pg_collection")
    made = together(
        lambda: adamws_overrides(overrides, model_chunks, settings, groups),
        None,
        device_of(model_chunks),
    )
    if overrides:
        call.arguments["config_overrides"] = made


def _with_upstreams(settings: MuonConfig, call: inspect.BoundArguments) -> MuonConfig:
    """The settings, with those that Megatron's own Muon takes by its config and
    overrides.
    """
    config = call.arguments["config"]
    model_chunks = call.arguments["model_chunks"]
    fields = fields_set(config)
    has_overrides = bool(routes(call.arguments))
    if config.optimizer == "muon" and not has_overrides and not fields:
        return settings
    # where any of them is there
    from megatron_muon.mcore.wiring import upstream_settings as upstreams

    def read() -> tuple[MuonConfig, list[str], upstreams.Asked]:
        overrides = call.arguments.get("config_overrides") or {}
        names = upstreams.routes_asked(overrides, model_chunks)
        return *upstreams.with_fields(settings, config, fields, model_chunks[0]), names

    settings, lines, names = together(read, None, device_of(model_chunks))
    start.unusual.extend(lines)
    if not has_overrides:
        return settings
    _drop_overrides(call, lambda name, value: name == "optimizer")
    return upstreams.routed(settings, names)


def _get_megatron_muon_optimizer(
    original: Function,
    config: Any,
    model_chunks: list[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wraps the builder of cores 0.16 and 0.17 for names with muon, which
    Megatron-Bridge calls.
    """
    if not _is_muon(config):
        return original(config, model_chunks, *args, **kwargs)
    call = inspect.signature(original).bind(config, model_chunks, *args, **kwargs)
    is_layer_wise = call.arguments.pop("layer_wise_distributed_optimizer", False)
    if is_layer_wise and config.optimizer == "muon":
        raise ValueError(
            "layer_wise_distributed_optimizer=True asks for Megatron's own Muon, but "
            "megatron_muon.install() has made optimizer='muon' the plugin's: use only "
            "one of the two"
        )
    return mcore_optimizer.get_megatron_optimizer(**call.arguments)


def _stopped(original: Function, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps the functions that ``get_megatron_optimizer`` calls, to stop the name
    ``muon`` there.

    It gets there only by a reference to Megatron's own function, taken before
    ``install()``.
    """
    if _is_muon(config):
        raise SeamError(
            f"optimizer={config.optimizer!r} was asked of a get_megatron_optimizer "
            "that was taken before megatron_muon.install(): call "
            "megatron.core.optimizer.get_megatron_optimizer"
        )
    return original(config, *args, **kwargs)


def _check_config(original: Function, config: Any) -> None:
    """Wraps the checks of a config: Megatron refuses some options with any Muon but its
    own.
    """
    asks = _is_muon(config) and any(getattr(config, name, False) for name in _OF_ADAMW)
    with _asking_for_adam(config) if asks else nullcontext():
        original(config)


def _build_ddp(original: Function, /, *args: Any, **kwargs: Any) -> None:
    """Wraps DistributedDataParallel's, whose grad buffers may get fewer buckets."""
    assert _config is not None
    if not host().leaves_buckets:
        original(*args, **kwargs)
        return
    from megatron_muon.mcore.wiring.buffers.bucket_layout import build

    build(_config, original, *args, **kwargs)


# How AdamW's states may be held; the last two are of NVIDIA's branch dev.
_OF_ADAMW = (
    "use_precision_aware_optimizer",
    "chunked_optimizer_state_offload",
    "offload_optimizer_states",
)


def _of(module: str, name: str) -> Function:
    """A wrapper that is imported when it is first called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


# Traces show Megatron's communication and its whole step, AdamW's too.
_MARKS: dict[str, Function] = {
    "_ParamAndGradBucketGroup.start_grad_sync": marking("grads/reduce"),
    "_ParamAndGradBucketGroup.finish_grad_sync": marking("grads/reduce"),
    "_ParamAndGradBucketGroup.start_param_sync": marking("params/gather"),
    "_ParamAndGradBucketGroup.finish_param_sync": marking("params/gather"),
    "ChainedOptimizer.step": marking("optimizer/step"),
}
# Wrappers by symbol name. Each takes the function of Megatron first, and is called only
# while the plugin is installed.
_WRAPPERS: dict[str, Function] = {
    **_MARKS,
    "get_megatron_optimizer": _get_megatron_optimizer,
    "get_megatron_muon_optimizer": _get_megatron_muon_optimizer,
    "_get_megatron_optimizer_based_on_param_groups": _stopped,
    "_get_megatron_emerging_optimizer": _stopped,
    "OptimizerConfig.__post_init__": _check_config,
    "DistributedDataParallel.__init__": _build_ddp,
    "clip_qk": _of("megatron_muon.mcore.qk_clip.attach", "clip_qk"),
    "save": _of("megatron_muon.mcore.checkpoint.seal", "save"),
    "load": _of("megatron_muon.mcore.checkpoint.seal", "load"),
}


@contextmanager
def _asking_for_adam(config: Any) -> Iterator[None]:
    """Say ``adam`` in the config itself, not in a copy: Megatron compares and updates
    it later.
    """
    name, config.optimizer = config.optimizer, "adam"
    try:
        yield
    finally:
        config.optimizer = name


def _decay_everything(call: inspect.BoundArguments) -> None:
    """Change the arguments of ``get_megatron_optimizer`` so that every weight is
    decayed.
    """
    if "no_weight_decay_cond" in call.signature.parameters:  # before core 0.16
        call.arguments["no_weight_decay_cond"] = lambda name, param: False
        return
    if call.arguments.get("config_overrides") is None:
        config = call.arguments["config"]
        standard = mcore_optimizer.get_standard_config_overrides(config=config)
        call.arguments["config_overrides"] = standard
    _drop_overrides(call, lambda *item: item == ("wd_mult", 0.0))


def _drop_overrides(
    call: inspect.BoundArguments, drops: Callable[[str, Any], bool]
) -> None:
    """Drop items of overrides, and overrides that are empty then: they would make a
    group.
    """
    kept = {}
    for key, override in call.arguments["config_overrides"].items():
        items = {name: it for name, it in override.items() if not drops(name, it)}
        if items:
            kept[key] = items
    call.arguments["config_overrides"] = kept
