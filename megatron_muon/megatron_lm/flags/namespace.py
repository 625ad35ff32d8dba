"""Megatron's arguments once Muon's flags are read: Megatron prints, logs, saves and
uses them.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any

from megatron_muon.settings.config import ROWS, MuonConfig
from megatron_muon.settings.flags import (
    ADAPTIVE,
    KEPT,
    MUONS,
    blockwise_lines,
    foreign_flags,
    megatron_defaults,
    muon_config,
    tp_size,
    upstream_defaults,
    upstream_value,
    written,
)
from megatron_muon.settings.rules import MATCHED, row_of
from megatron_muon.settings.run_flags import FLAGS, OF_ANY, RUN_ROWS

# Flags that a run with AdamW may have.
_OF_ADAM = (
    "adamw_from_muon",
    "weight_decay_all_params",
    "muon_qk_clip",
    "muon_qk_clip_alpha",
)


def parsed() -> Any:
    """Megatron-LM's arguments of this run, once they are parsed."""
    return importlib.import_module("megatron.training").get_args()


def is_on(args: Any) -> bool:
    """Whether the run is Muon's; True only after ``validate_args``."""
    return bool(getattr(args, "megatron_muon", False))


def rename_megatrons(args: Namespace) -> list[str]:
    """Make ``dist_muon`` Muon with Megatron's own defaults, as from Python; lines to
    print.

    Up to core 0.15 Megatron has neither the name nor defaults, so there it is ``muon``
    alone.

    Raises:
        ValueError: the name is ``adaptive_muon``.
    """
    given = args.optimizer
    if given == "muon":
        return []
    if given == "adaptive_muon":
        raise ValueError(f"--optimizer adaptive_muon: {ADAPTIVE}")
    args.optimizer = "muon"
    name = "--optimizer muon"
    defaults = upstream_defaults(args)
    if defaults:
        args.muon_defaults = written(args, "muon_defaults") or "upstream"
        name += f" --muon-defaults {args.muon_defaults}"
    lines = [
        f"--optimizer {given} is megatron_muon's Muon here; its name is {name} "
        "(--muon-backend upstream leaves it to Megatron's own)"
    ]
    if written(args, "muon_tp_mode") is None:
        option, mode = "--muon-tp-mode blockwise", defaults.get("muon_tp_mode")
        warning = blockwise_lines(args, option, mode)
        if warning:
            args.muon_tp_mode = "duplicated"
        lines += warning
    return lines


def remove_flags(args: Namespace) -> None:
    """Make ``args`` what it is without the plugin, for a run that is not this package's
    Muon.

    Megatron's own flags keep the given value or get Megatron's default; the plugin's
    are removed. A second call has no effect.

    Raises:
        ValueError: a flag is given that only the plugin has and that would be ignored.
    """
    if not hasattr(args, KEPT):
        return
    kept = set(megatron_defaults(args))
    if args.optimizer in MUONS:  # with --muon-backend upstream
        kept.add("muon_backend")
    others = OF_ANY + (_OF_ADAM if args.optimizer == "adam" else ())
    kept |= {dest for dest in others if written(args, dest)}
    if "adamw_from_muon" in kept:
        kept.add("no_muon_checkpoint_digest")
    foreign = foreign_flags(args, kept)
    if foreign:
        raise ValueError(
            f"{', '.join(foreign)} is for megatron_muon's --optimizer muon, and this "
            f"run has --optimizer {args.optimizer}: leave it out, or give --optimizer "
            "muon"
        )
    restore_defaults(args)
    for dest in {flag.dest for flag in FLAGS} - kept:
        if hasattr(args, dest):
            delattr(args, dest)
    delattr(args, KEPT)


def restore_defaults(args: Namespace) -> None:
    """Set Megatron's own default again for every flag that was not given.

    Call it after ``muon_config`` and ``differences``, which must know the flags that
    were given.
    """
    for dest, default in megatron_defaults(args).items():
        if written(args, dest) is None:
            setattr(args, dest, default)


def write_all(args: Namespace, config: MuonConfig) -> None:
    """Write the settings of a run into its arguments, each with Megatron's own type.

    Values are plain, so that a checkpoint's arguments can be read without the plugin.
    Flags of Megatron that the plugin does not know get Megatron's defaults.
    """
    restore_defaults(args)
    vars(args).update(all_written(args, config))
    if hasattr(args, KEPT):
        delattr(args, KEPT)


def all_written(args: Namespace, config: MuonConfig) -> dict[str, Any]:
    """The value of every flag of ``FLAGS``, by dest, such that they give ``config``
    again.

    ``muon_ns_iteration`` and ``muon_split_matrices`` stay None where they were not
    given: their defaults depend on the device.
    """
    values = {}
    for field, row in ROWS.items():
        for flag in row.flags:
            values[flag.dest] = flag.kind.write(getattr(config, field))
    for row in RUN_ROWS:
        dest = row.flags[0].dest
        values[dest] = written(args, dest) or row.default
    values["muon_dp_layout"] = written(args, "muon_dp_layout") or "contiguous"
    values["muon_tp_mode"] = "duplicated"
    if config.scale_mode not in MATCHED:
        values["muon_matched_adamw_rms"] = None
    if config.qk_clip is None:
        values["muon_qk_clip_alpha"] = None
    if config.ns_dtype not in (None, "bf16"):
        values["muon_fp32_matmul_prec"] = (
            "highest"  # torch's word for fp32 without TF32
        )
    return values


def differences(args: Namespace) -> list[str]:
    """A line with all settings that differ from the defaults of this Megatron's own
    Muon.

    Another line where ``--muon-tp-mode`` is given: its result is the same, its method
    is not.

    Raises:
        ValueError: see ``muon_config``.
    """
    config = muon_config(args)
    unlike = [
        f"{setting} {ours} ({theirs})"
        for setting, ours, theirs in _compared(config, args)
        if ours != theirs
    ]
    lines = []
    if unlike:
        lines.append(f"unlike the defaults of Megatron's own Muon: {', '.join(unlike)}")
    if written(args, "muon_tp_mode") is not None:
        lines.append(
            f"--muon-tp-mode {args.muon_tp_mode}: each matrix is orthogonalized once "
            "and whole, at its home, with the same result"
        )
    return lines


def _compared(config: MuonConfig, args: Namespace) -> list[tuple[str, object, object]]:
    """(name, value here, default of Megatron's own Muon) of each setting that both
    have.
    """
    defaults = upstream_defaults(args)
    if not defaults:
        return []
    compared: list[tuple[str, object, object]] = []
    rule = row_of(config.rule)
    for field, row in ROWS.items():
        theirs = upstream_value(args, row)
        if theirs is not None and field not in rule.unscaled:
            flag = theirs.flag
            name = row.named if flag.is_switch else flag.option
            ours = getattr(config, field)
            compared.append((name, flag.kind.write(ours), defaults[flag.dest]))
    dtype = config.ns_dtype or ("fp16 on a GPU" if config.preset == "fast" else "bf16")
    precision = defaults["muon_fp32_matmul_prec"]
    # With TP 1 all modes are the same, so there is no difference to report.
    mode = "duplicated" if tp_size(args) > 1 else defaults["muon_tp_mode"]
    return [
        *compared,
        ("--muon-ns-dtype", dtype, "bf16" if precision == "medium" else precision),
        ("--muon-tp-mode", mode, defaults["muon_tp_mode"]),
        ("--weight-decay-all-params", config.weight_decay_all_params, False),
    ]
