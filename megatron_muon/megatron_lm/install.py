"""``--optimizer muon`` in Megatron-LM's training scripts: parser, checks and optimizer
factory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatron_muon.console import say_once
from megatron_muon.mcore.host.loop import NO_HOST, set_host
from megatron_muon.mcore.seams.rows import (
    check_hooks,
    check_row,
    megatron_version,
    rows_of,
)
from megatron_muon.mcore.seams.training import ROWS
from megatron_muon.megatron_lm import checkpointing
from megatron_muon.megatron_lm.flags import namespace
from megatron_muon.megatron_lm.flags.parser import (
    add_flags,
    given_on,
    mend_help,
    shorten_errors,
)
from megatron_muon.megatron_lm.host import MegatronLM
from megatron_muon.planning import agreed
from megatron_muon.runtime.consensus import agree_on_settings
from megatron_muon.runtime.patches import Function, Patches, replaced
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.flags import (
    KEPT,
    MUONS,
    muon_config,
    qk_clip_alpha,
    written,
)
from megatron_muon.settings.run_flags import OF_ADAMW

_patches = Patches()


def install_training() -> None:
    """Wrap megatron.training so that its parser has Muon's flags and ``--optimizer
    muon`` works.

    In a run with Muon, Megatron's checks see AdamW with the distributed optimizer,
    while the arguments that it prints, logs and saves say Muon. A run without is as
    without the plugin. Idempotent.

    Raises:
        SeamError: names a function that megatron.training lacks or has with another
            signature.
    """
    text, version = megatron_version()
    for seam in rows_of(version, ROWS):  # the parser first: a later one may fail
        check_row(seam, text)
        if seam.name in _WRAPPERS:
            wrap(seam.module, seam.name, _WRAPPERS[seam.name])


def wrap(module_name: str, name: str, wrapper: Function) -> None:
    """Put ``wrapper(original, ...)`` around a function of megatron.training.
    Idempotent.
    """
    within = module_name if name in _THERE_ALONE else "megatron."
    _patches.wrap(module_name, name, wrapper, within)


def uninstall_training() -> None:
    """Restore megatron.training's own functions, and leave no trace in its modules."""
    set_host(NO_HOST)
    _patches.undo()


def asks_for_muon(args: Any) -> bool:
    """Whether parsed arguments ask for this package's Muon, not for Megatron's own."""
    is_muon = getattr(args, "optimizer", None) in MUONS
    return is_muon and written(args, "muon_backend") != "upstream"


# --- the wrappers ---------------------------------------------------------------------


def _parse_args(
    original: Function,
    extra_args_provider: Callable[[Any], Any] | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's parsing, with Muon's flags added to the script's own."""
    options: list[str] = []

    def provide(parser: Any) -> Any:
        parser = parser if extra_args_provider is None else extra_args_provider(parser)
        add_flags(parser)
        mend_help(parser)
        shorten_errors(parser)
        options.extend(given_on(parser, sys.argv[1:]))
        if any(word.partition("=")[0] == "--yaml-cfg" for word in sys.argv):
            # before the YAML reader of Megatron main, which fails
            _refuse_yaml(None, options)
        return parser

    args = original(provide, *rest, **kwargs)
    if getattr(args, "yaml_cfg", None) is not None:
        _refuse_yaml(args, options)
    return args


def _validate_args(
    original: Function,
    args: Any,
    defaults: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Megatron's validation, which sees AdamW where the run asks for Muon.

    It has Megatron's branches for its own Muon: assertions up to 0.17, later a rewrite
    of ``use_distributed_optimizer``.
    """
    is_muon = asks_for_muon(args)
    is_new = is_muon and not namespace.is_on(args)  # it may be validated twice
    lines = [] if is_muon else _without_muon(args)
    if is_new:
        _install_muon(args)
    hidden: dict[str, Any] = {"optimizer": "adam"} if is_muon else {}
    if _is_on_cpu():
        lines += _on_the_cpu(args)
        # Megatron's checks of options on logits want Transformer Engine.
        hidden |= {name: False for name in _LOGITS if getattr(args, name, False)}
    with replaced(args, **hidden):
        result = original(args, defaults or {}, **kwargs)
    if is_new:
        set_host(MegatronLM(leaves_buckets=namespace.leaves_buckets(args)))
    _tell(lines)
    return result


def _tell(lines: list[str]) -> None:
    """Print lines; ``lab.dry_run`` replaces this, and ``_on_the_cpu``, by name."""
    for line in lines:
        say_once(f"[megatron_muon] {line}")


def _on_the_cpu(args: Any) -> list[str]:
    """Replace options that need a GPU; return a line for each."""
    options = importlib.import_module("megatron_muon.cpu.options")
    options.refuse(args)
    lines: list[str] = options.replace(args)
    return lines


def _is_on_cpu() -> bool:
    return bool(importlib.import_module("megatron_muon.cpu").enabled())


def _without_muon(args: Any) -> list[str]:
    """Remove Muon's flags from a run without Muon, and install what AdamW can use.

    With the distributed optimizer that includes Megatron's own ``--qk-clip``, which
    fails on shards. Returns lines to print.
    """
    again = not hasattr(args, KEPT)
    if args.optimizer != "adam":
        namespace.remove_flags(args)
        return []
    alpha = qk_clip_alpha(args)
    namespace.remove_flags(args)
    lines = []
    decayed = bool(written(args, "weight_decay_all_params"))
    if decayed:
        lines.append(
            "--weight-decay-all-params: AdamW decays norms' gammas and biases, too"
        )
    threshold = written(args, "muon_qk_clip")
    if threshold is not None:
        if not args.use_distributed_optimizer:
            raise ValueError(
                "--muon-qk-clip clips the distributed optimizer's shards: add "
                "--use-distributed-optimizer, or leave it out"
            )
        lines.append(
            f"--muon-qk-clip {threshold:g}: attention logits are clipped after AdamW's "
            "steps"
        )
    for name, text in _LOGITS.items() if args.use_distributed_optimizer else ():
        # on a GPU Megatron logs logits by itself
        if written(args, name) and (name == "qk_clip" or _is_on_cpu()):
            lines.append(text)
    if lines or written(args, "use_pytorch_profiler"):  # traces have the marks
        importlib.import_module("megatron_muon.mcore.wiring.install").install(
            MuonConfig(
                weight_decay_all_params=decayed, qk_clip=threshold, qk_clip_alpha=alpha
            )
        )
    return [] if again else lines


# Megatron's options about attention logits, and what the plugin says of them without
# Muon.
_LOGITS = {
    "qk_clip": "--qk-clip: the plugin clips the shards of AdamW's main parameters",
    "log_max_attention_logit": (
        "--log-max-attention-logit: the plugin reduces the logits"
    ),
}


def _install_muon(args: Any) -> None:
    """Check a run with Muon, install Muon, and write its settings into ``args``."""
    check_hooks()  # before the imports below, which import names of Megatron's
    from megatron_muon.mcore.wiring.install import install
    from megatron_muon.mcore.wiring.validate import raise_all

    namespace.refuse_megatrons_names(args)
    raise_all(faults_of(args))
    config = muon_config(args)
    install(config)
    namespace.write_all(args, config)
    args.megatron_muon = True


def faults_of(args: Any) -> Iterator[Exception]:
    """What the optimizer would refuse once the model is built, by the flags."""
    from megatron_muon.mcore.wiring.validate import refused_modes

    if not args.use_distributed_optimizer:
        yield ValueError(
            f"--optimizer {args.optimizer} is Distributed Muon, which shards over "
            "Megatron's distributed optimizer: add --use-distributed-optimizer, or "
            "choose Megatron's own Muon, where this Megatron has one, by "
            "--muon-backend upstream"
        )
    by_field = {**vars(args), "num_moe_experts": getattr(args, "num_experts", None)}
    for option, value, way_out in refused_modes(by_field.get):
        if value:
            name, space, where = option.partition(" ")
            text = f"--{name.replace('_', '-')}{space}{where} yet: {way_out}"
            yield NotImplementedError(
                f"--optimizer {args.optimizer} does not support {text}, or choose "
                "--optimizer adam"
            )


def _refuse_yaml(args: Any, options: list[str]) -> None:
    if getattr(args, "optimizer", None) in MUONS:
        options = [f"optimizer: {args.optimizer}", *options]
    if options:
        raise ValueError(
            f"{', '.join(options)} with --yaml-cfg: Megatron takes every argument from "
            "the file and checks them elsewhere, so Muon's have no place there; give "
            "the run by flags"
        )


def _print_args(original: Function, title: str, args: Any, **kwargs: Any) -> Any:
    """Megatron's printing of the arguments, with the optimizer's name as it was
    given.
    """
    shown = {"optimizer": "muon"} if namespace.is_on(args) else {}
    with replaced(args, **shown):
        return original(title, args, **kwargs)


def _get_megatron_optimizer_config(original: Function, args: Any, **kwargs: Any) -> Any:
    """Megatron's optimizer config, with its own Muon's settings reset: the flags filled
    them.
    """
    result = original(args, **kwargs)
    if namespace.is_on(args):
        from megatron_muon.mcore.wiring.validate import own_muons_fields

        config = result[0] if isinstance(result, tuple) else result
        for name, default in own_muons_fields(config).items():
            setattr(config, name, default)
    return result


def _get_megatron_muon_optimizer(
    original: Function,
    config: Any,
    model_chunks: Any,
    *args: Any,
    layer_wise_distributed_optimizer: bool = False,
    **kwargs: Any,
) -> Any:
    """Build Distributed Muon by the hooked factory: 0.16 and 0.17 call this one for any
    Muon.
    """
    arguments = namespace.parsed()
    if not namespace.is_on(arguments):
        kwargs["layer_wise_distributed_optimizer"] = layer_wise_distributed_optimizer
        return original(config, model_chunks, *args, **kwargs)
    hooked = importlib.import_module("megatron.core.optimizer").get_megatron_optimizer
    # Megatron passes it only to AdamW's factory
    dump = arguments.dump_param_to_param_group_map
    return hooked(
        config, model_chunks, *args, dump_param_to_param_group_map=dump, **kwargs
    )


def _initialize_megatron(original: Function, *rest: Any, **kwargs: Any) -> Any:
    """Megatron's; then all ranks compare what they ask of the plugin."""
    result = original(*rest, **kwargs)
    args = namespace.parsed()
    # imported where anything is asked
    core = sys.modules.get("megatron_muon.mcore.wiring.install")
    config = None if core is None else core.settings()
    flags = {dest: written(args, dest) or None for dest in (*_AGREED, *OF_ADAMW)}
    flags |= {dest: bool(written(args, dest)) for dest in ("load", "save")}
    core_version, _ = megatron_version()
    lines = agreed.run_lines(config or MuonConfig(), args.optimizer, core_version)
    for dest, value in flags.items():
        lines.append(f"--{dest.replace('_', '-')}: {value!r}")
    asks = bool(config or flags["adamw_from_muon"])

    agree_on_settings(lines, asks=asks)
    return result


# Flags that votes of the plugin depend on, and that are no settings of MuonConfig.
_AGREED = (
    "muon_backend",
    "muon_from_adamw",
    "finetune",
    "no_load_optim",
    "override_opt_param_scheduler",
    "ckpt_step",
    "use_dist_ckpt",
    "non_persistent_ckpt_type",
    "muon_dp_layout",
)


# The wrappers of the seam table's rows, by name; ``autoload`` wraps
# ``initialize_megatron``, too.
_WRAPPERS: dict[str, Function] = {
    "initialize_megatron": _initialize_megatron,
    "parse_args": _parse_args,
    "validate_args": _validate_args,
    "_print_args": _print_args,
    "generate_state_dict": checkpointing.generate_state_dict,
    "save_checkpoint": checkpointing.save_checkpoint,
    "load_checkpoint": checkpointing.load_checkpoint,
    "get_megatron_optimizer_config": _get_megatron_optimizer_config,
    "get_megatron_muon_optimizer": _get_megatron_muon_optimizer,
}
# Replaced in the one module only: in megatron.core, ``mcore.wiring.install`` wraps it.
_THERE_ALONE = ("get_megatron_muon_optimizer",)
