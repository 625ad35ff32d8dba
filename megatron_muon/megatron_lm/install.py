"""``--optimizer muon`` in Megatron-LM's training scripts: its parser, its checks, its factory."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_muon.config import MuonConfig
from megatron_muon.mcore.seams.rows import SeamError, check_arguments, check_training_hooks
from megatron_muon.megatron_lm import bucketing, checkpointing, flags, memory, namespace
from megatron_muon.megatron_lm.flag_values import KEPT


class Seam(NamedTuple):
    """A function of megatron.training that is wrapped.

    Attributes:
        module: of megatron.training, where it is defined or looked up.
        name: of the function.
        parameters: those that must be in its signature.
        wrapper: takes Megatron's function, then what that takes.
        always: False where some releases do without it.
        everywhere: also where other modules of Megatron's have it by import.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    wrapper: Callable[..., Any]
    always: bool = True
    everywhere: bool = True


def install_training() -> None:
    """Put the flags into Megatron-LM's parser, and Muon where ``--optimizer muon`` asks for it.

    Megatron's own checks then see AdamW with the distributed optimizer; the arguments that it
    prints, logs and saves say Muon. A run that does not ask for Muon is as without the plugin.
    Idempotent.

    Raises:
        SeamError: megatron.training lacks a function, or has another shape of it; names it.
    """
    modules = {
        name: importlib.import_module(f"megatron.training.{name}")
        for name in ("arguments", "checkpointing", "initialize", "training")
    }
    check_training_hooks()
    for seam in _SEAMS:
        original: Any = getattr(modules[seam.module], seam.name, None)
        if hasattr(original, "megatron_muon_wraps"):
            continue
        if original is None and not seam.always:
            continue
        _check_shape(seam, original)
        wrapped: Any = functools.wraps(original)(functools.partial(seam.wrapper, original))
        wrapped.megatron_muon_wraps = original
        if seam.everywhere:
            replace_everywhere(seam.name, original, wrapped)
        else:
            setattr(modules[seam.module], seam.name, wrapped)


def asks_for_muon(args: Any) -> bool:
    """True where parsed arguments ask for this package's Muon, not for Megatron's own.

    Raises:
        ValueError: ``--muon-backend upstream`` cannot be.
    """
    return getattr(args, "optimizer", None) == "muon" and flags.muon_backend(args) == "plugin"


def _check_shape(seam: Seam, original: Any) -> None:
    symbol = f"megatron.training.{seam.module}.{seam.name}"
    version = importlib.import_module("megatron.core").__version__
    if original is None:
        raise SeamError(
            f"the Megatron-LM of core {version} has no {symbol}, which megatron_muon wraps: if it "
            "is a fork's, give it the function that the release of its version has; else take a "
            "megatron_muon that knows it, or run the script without it"
        )
    found = inspect.signature(original).parameters
    missing = [name for name in seam.parameters if name not in found]
    if missing:
        raise SeamError(
            f"{symbol} of core {version} has no parameter {', '.join(missing)}, which "
            "megatron_muon needs: if this Megatron-LM is a fork's, give it the one that the "
            "release of its version has; else take a megatron_muon that knows it"
        )


def replace_everywhere(name: str, old: Any, new: Any) -> None:
    """In every module of Megatron's that has ``old`` under its name, by import too."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.") and getattr(module, name, None) is old:
            setattr(module, name, new)


# --- the wrappers ----------------------------------------------------------------------------


def _parse_args(
    original: Callable[..., Any],
    extra_args_provider: Callable[[Any], Any] | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's, with Muon's flags among the script's own."""
    given: list[str] = []

    def provide(parser: Any) -> Any:
        parser = parser if extra_args_provider is None else extra_args_provider(parser)
        flags.add_flags(parser)
        flags.mend_help(parser)
        given.extend(namespace.given_on(parser, sys.argv[1:]))
        if any(word.partition("=")[0] == "--yaml-cfg" for word in sys.argv):
            _refuse_yaml(None, given)  # before main's reader of such files, which fails
        return parser

    args = original(provide, *rest, **kwargs)
    if getattr(args, "yaml_cfg", None) is not None:
        _refuse_yaml(args, given)
    return args


def _validate_args(
    original: Callable[..., Any], args: Any, defaults: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Megatron's, which is shown AdamW where the run asks for Muon.

    Megatron's own branches for its own Muon are all in there, up to 0.17 as assertions and later as
    a rewrite of ``use_distributed_optimizer``. What comes after takes the distributed optimizer.

    Raises:
        SeamError: the Megatron is not one that the plugin knows.
        ValueError: what the flags ask for cannot be; names the flag and the way out.
        NotImplementedError: Muon does not have it yet; names the option and the way out.
    """
    if not asks_for_muon(args):
        told = [*_leave_out(args), *_on_the_cpu(args)]
        result = original(args, defaults or {}, **kwargs)
        _tell(told)
        return result
    again = namespace.is_on(args)  # a namespace may be validated twice
    told = [] if again else _turn_on(args)
    told += _on_the_cpu(args)
    args.optimizer = "adam"
    try:
        result = original(args, defaults or {}, **kwargs)
    finally:
        args.optimizer = "muon"
    check_arguments(args)
    if not again:
        told += bucketing.choose_buckets(args)
    _tell(told)
    return result


def _tell(lines: list[str]) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        for line in lines:
            print(f"[megatron_muon] {line}", flush=True)


def _on_the_cpu(args: Any) -> list[str]:
    """Where the CPU runtime is on, replace what only a GPU has; lines that say so."""
    if not importlib.import_module("megatron_muon.cpu").enabled():
        return []
    options = importlib.import_module("megatron_muon.cpu.options")
    options.refuse(args)
    told: list[str] = options.replace(args)
    return told


def _leave_out(args: Any) -> list[str]:
    """Leave a run that is not Muon's to Megatron, but for AdamW's ``--weight-decay-all-params``."""
    again = not hasattr(args, KEPT)
    namespace.leave_to_megatron(args)
    if args.optimizer != "adam" or not getattr(args, "weight_decay_all_params", False):
        return []
    importlib.import_module("megatron_muon.mcore.install").install(
        MuonConfig(weight_decay_all_params=True)
    )
    line = "--weight-decay-all-params: AdamW decays norms' gammas and biases, too"
    return [] if again else [line]


def _turn_on(args: Any) -> list[str]:
    """Check a run with Muon, install it, and put what is in force into ``args``.

    Returns:
        Lines to print: what differs from Megatron's own defaults.
    """
    from megatron_muon.mcore.install import install

    _check(args)
    config = flags.muon_config(args)
    if bucketing.aligns_shards(args):
        config = dataclasses.replace(config, align_shards=True)
    told = flags.differences(args)
    install(config)
    namespace.put_in_force(args, config)
    args.megatron_muon = True
    return told


# Flags that stop a run here, before any model is made, and why. ``mcore.params.validate`` has what
# a configuration can say.
REFUSED = {
    "--use-precision-aware-optimizer": "which keeps no fp32 main parameters of Megatron's",
    "--use-mup": "whose rates are Adam's",
    "--qk-clip": "which takes a main parameter for the whole matrix, where the distributed "
    "optimizer, AdamW's too, has a shard of it: the run would end at the first logit above the "
    "threshold (--log-max-attention-logit alone works)",
}


def _check(args: Any) -> None:
    if not args.use_distributed_optimizer:
        raise ValueError(
            "--optimizer muon is Distributed Muon, which shards over Megatron's distributed "
            "optimizer: add --use-distributed-optimizer, or choose Megatron's own Muon, where this "
            "Megatron has one, by --muon-backend upstream"
        )
    for flag, why in REFUSED.items():
        if getattr(args, flag.removeprefix("--").replace("-", "_"), False):
            raise NotImplementedError(
                f"--optimizer muon does not support {flag} yet, {why}: leave it out, or choose "
                "--optimizer adam"
            )


def _refuse_yaml(args: Any, given: list[str]) -> None:
    if getattr(args, "optimizer", None) == "muon":
        given = ["optimizer: muon", *given]
    if given:
        raise ValueError(
            f"{', '.join(given)} with --yaml-cfg: Megatron takes every argument from the file and "
            "checks them elsewhere, so Muon's have no place there; give the run by flags"
        )


def _print_args(original: Callable[..., Any], title: str, args: Any, **kwargs: Any) -> Any:
    """Megatron's, with the optimizer's name as it was given."""
    if namespace.is_on(args):
        args = copy.copy(args)
        args.optimizer = "muon"
    return original(title, args, **kwargs)


def _get_megatron_optimizer_config(original: Callable[..., Any], args: Any, **kwargs: Any) -> Any:
    """Megatron's, without the settings of its own Muon, which the flags have filled."""
    result = original(args, **kwargs)
    if namespace.is_on(args):
        config = result[0] if isinstance(result, tuple) else result
        for field in dataclasses.fields(config):
            if field.name.startswith("muon_"):
                setattr(config, field.name, field.default)
    return result


def _get_megatron_muon_optimizer(
    original: Callable[..., Any],
    config: Any,
    model_chunks: Any,
    *args: Any,
    layer_wise_distributed_optimizer: bool = False,
    **kwargs: Any,
) -> Any:
    """Of 0.16 and 0.17, whose training asks here for Muon; the distributed one is made as AdamW."""
    given = importlib.import_module("megatron.training").get_args()
    if namespace.is_on(given):
        hooked = importlib.import_module("megatron.core.optimizer").get_megatron_optimizer
        dump = given.dump_param_to_param_group_map  # which Megatron hands to AdamW's alone
        return hooked(config, model_chunks, *args, dump_param_to_param_group_map=dump, **kwargs)
    layer_wise = layer_wise_distributed_optimizer
    return original(
        config, model_chunks, *args, layer_wise_distributed_optimizer=layer_wise, **kwargs
    )


_SEAMS = (
    Seam("arguments", "parse_args", ("extra_args_provider",), _parse_args),
    Seam("arguments", "validate_args", ("args", "defaults"), _validate_args),
    Seam("arguments", "_print_args", ("title", "args"), _print_args),
    Seam("checkpointing", "generate_state_dict", ("args",), checkpointing.generate_state_dict),
    Seam("checkpointing", "save_checkpoint", ("iteration", "model"), checkpointing.save_checkpoint),
    Seam(
        "checkpointing",
        "load_checkpoint",
        ("ddp_model", "optimizer", "opt_param_scheduler"),
        checkpointing.load_checkpoint,
    ),
    Seam(
        "training",
        "get_megatron_optimizer_config",  # since 0.16
        ("args",),
        _get_megatron_optimizer_config,
        always=False,
    ),
    Seam(
        "training",
        "get_megatron_muon_optimizer",  # 0.16 and 0.17
        ("config", "model_chunks", "layer_wise_distributed_optimizer"),
        _get_megatron_muon_optimizer,
        always=False,
        everywhere=False,  # megatron.core's own is mcore.install's
    ),
    Seam(
        "training",
        "report_theoretical_memory",
        ("args",),
        memory.report_theoretical_memory,
        always=False,
    ),
)
