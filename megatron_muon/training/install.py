"""``--optimizer muon`` in Megatron-LM's training scripts: its parser, its checks, its factory."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

from megatron_muon.mcore.install import install
from megatron_muon.training import flags

# Modules of megatron.training that hold a wrapped function under its own name.
_HOLDERS = {
    "parse_args": ("arguments", "initialize"),
    "validate_args": ("arguments", "initialize"),
    "_print_args": ("arguments",),
    "get_megatron_optimizer": ("training",),
}


def install_training() -> None:
    """Put the flags into Megatron-LM's parser, and Muon where ``--optimizer muon`` asks for it.

    Megatron then takes its ordinary path of AdamW with the distributed optimizer; only the name
    that it prints is Muon's. Idempotent.

    Raises:
        SeamError: the Megatron is not one that the plugin knows.
    """
    install()
    for name, wrapper in _WRAPPERS.items():
        holders = [importlib.import_module(f"megatron.training.{m}") for m in _HOLDERS[name]]
        original = getattr(holders[0], name)
        if getattr(original, "megatron_muon_wraps", None) is not None:
            continue
        wrapped = functools.wraps(original)(functools.partial(wrapper, original))
        wrapped.megatron_muon_wraps = original  # type: ignore[attr-defined]
        for holder in holders:
            if hasattr(holder, name):
                setattr(holder, name, wrapped)


def is_on(args: Any) -> bool:
    """True once ``validate_args`` has found that the run is Muon's."""
    return bool(getattr(args, "megatron_muon", False))


def _parse_args(
    original: Callable[..., Any],
    extra_args_provider: Callable[[Any], Any] | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's, with Muon's flags among the script's own."""

    def provide(parser: Any) -> Any:
        parser = parser if extra_args_provider is None else extra_args_provider(parser)
        flags.add_flags(parser)
        return parser

    return original(provide, *rest, **kwargs)


def _validate_args(
    original: Callable[..., Any], args: Any, defaults: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Megatron's, of a run that asks for AdamW where it asks for Muon.

    Raises:
        ValueError: what the flags ask for cannot be; names the flag and the way out.
    """
    args.megatron_muon = args.optimizer == "muon" and flags.muon_backend(args) == "plugin"
    if args.megatron_muon:
        _check(args)
        args.optimizer = "adam"
    else:
        flags.restore_defaults(args)
    return original(args, defaults or {}, **kwargs)


def _check(args: Any) -> None:
    if not args.use_distributed_optimizer:
        raise ValueError(
            "--optimizer muon is Distributed Muon, which shards over Megatron's distributed "
            "optimizer: add --use-distributed-optimizer, or choose Megatron's own Muon, where this "
            "Megatron has one, by --muon-backend upstream"
        )
    flags.muon_config(args)  # raises where a flag has no meaning here
    if args.save and not args.no_save_optim:
        raise NotImplementedError(
            "--optimizer muon cannot save its optimizer state yet: add --no-save-optim to save the "
            "model alone, or leave out --save"
        )
    if args.load and not (args.no_load_optim or args.finetune):
        raise NotImplementedError(
            "--optimizer muon cannot load optimizer state yet: add --no-load-optim or --finetune"
        )


def _print_args(original: Callable[..., Any], title: str, args: Any) -> None:
    """Megatron's, with the optimizer's name as it was given."""
    if not is_on(args):
        original(title, args)
        return
    args.optimizer = "muon"
    try:
        original(title, args)
    finally:
        args.optimizer = "adam"


def _get_megatron_optimizer(
    original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Megatron's, asked for Muon where the flags did."""
    given = importlib.import_module("megatron.training").get_args()
    if not is_on(given):
        return original(config, *args, **kwargs)
    for field in dataclasses.fields(config):  # Megatron's own Muon's, which the flags fill
        if field.name.startswith("muon_"):
            setattr(config, field.name, field.default)
    config.optimizer = "muon"
    install(flags.muon_config(given))
    if int(os.environ.get("RANK", "0")) == 0:
        for line in flags.differences(given):
            print(f"[megatron_muon] {line}", flush=True)
    return original(config, *args, **kwargs)


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "parse_args": _parse_args,
    "validate_args": _validate_args,
    "_print_args": _print_args,
    "get_megatron_optimizer": _get_megatron_optimizer,
}
