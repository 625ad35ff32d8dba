"""Megatron's arguments once Muon's flags are read: Megatron prints, logs, saves and uses them."""

from __future__ import annotations

import argparse
import itertools
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from megatron_muon.megatron_lm.flags.parser import foreign_flags, restore_defaults
from megatron_muon.megatron_lm.flags.table import FLAGS, OF_ANY
from megatron_muon.megatron_lm.flags.values import KEPT
from megatron_muon.settings.coefficients import spelled
from megatron_muon.settings.config import MuonConfig

# Flags that a run with AdamW may have.
_OF_ADAM = ("adamw_from_muon", "weight_decay_all_params", "muon_qk_clip", "muon_qk_clip_alpha")


def is_on(args: Any) -> bool:
    """Whether the run is Muon's; True only after ``validate_args``."""
    return bool(getattr(args, "megatron_muon", False))


def leave_to_megatron(args: Namespace) -> None:
    """Make ``args`` what it is without the plugin, for a run that is not this package's Muon.

    Megatron's own flags keep the given value or get Megatron's default; the plugin's are removed.
    A second call has no effect.

    Raises:
        ValueError: a flag is given that only the plugin has and that would be ignored.
    """
    own: dict[str, Any] | None = getattr(args, KEPT, None)
    if own is None:
        return
    upstream = args.optimizer == "muon"  # with --muon-backend upstream, which is kept
    kept = {*own, "muon_backend"} if upstream else {*own}
    kept |= {dest for dest in OF_ANY if getattr(args, dest, None)}
    if args.optimizer == "adam":
        kept |= {dest for dest in _OF_ADAM if getattr(args, dest, None)}
        if getattr(args, "adamw_from_muon", None):
            kept.add("no_muon_checkpoint_digest")
    foreign = foreign_flags(args, kept)
    if foreign:
        raise ValueError(
            f"{', '.join(foreign)} is for megatron_muon's --optimizer muon, and this run has "
            f"--optimizer {args.optimizer}: leave it out, or give --optimizer muon"
        )
    restore_defaults(args)
    for dest in {flag.dest for flag in FLAGS} - kept:
        if hasattr(args, dest):
            delattr(args, dest)
    delattr(args, KEPT)


def put_in_force(args: Namespace, config: MuonConfig) -> None:
    """Write the settings of a run into its arguments, each with Megatron's own type.

    Values are plain, so that a checkpoint's arguments can be read without the plugin. Flags of
    Megatron that the plugin does not know get Megatron's defaults.
    """
    restore_defaults(args)
    for dest, value in in_force(args, config).items():
        setattr(args, dest, value)
    if hasattr(args, KEPT):
        delattr(args, KEPT)


def in_force(args: Namespace, config: MuonConfig) -> dict[str, Any]:
    """The value of every flag of ``FLAGS``, by dest, such that they give ``config`` again.

    ``muon_ns_iteration`` and ``muon_split_matrices`` stay None where they were not given: their
    defaults depend on the device.
    """
    spectral, named = config.scale_mode == "spectral", config.ns_coefficients
    # In fp32 torch's own switch sets the products' precision; it has more names than the flag.
    fp32 = torch.get_float32_matmul_precision()
    return {
        "muon_matched_adamw_rms": config.matched_adamw_rms if spectral else None,
        "muon_momentum": config.momentum,
        "muon_ns_steps": config.ns_steps,
        "no_muon_nesterov": not config.nesterov,
        "muon_num_ns_steps": config.ns_steps,
        "muon_nesterov": config.nesterov,
        "muon_use_nesterov": config.nesterov,
        "muon_scale_mode": config.scale_mode,
        "muon_extra_scale_factor": config.matched_adamw_rms,
        "muon_coefficient_type": named if isinstance(named, str) else "custom",
        "muon_fp32_matmul_prec": "medium" if config.ns_dtype in (None, "bf16") else fp32,
        "muon_split_qkv": config.split_qkv,
        "muon_tp_mode": "duplicated",
        "muon_scalar_optimizer": "adam",
        "muon_use_syrk": False,
        "muon_clip_scope": config.clip_scope,
        "weight_decay_all_params": config.weight_decay_all_params,
        "muon_split": [f"{pattern}={kind}" for pattern, kind in config.splits],
        "muon_lr_mult": [f"{pattern}={factor!r}" for pattern, factor in config.lr_mults],
        "muon_wd_mult": [f"{pattern}={factor!r}" for pattern, factor in config.wd_mults],
        "muon_qk_clip": config.qk_clip,
        "muon_qk_clip_alpha": config.qk_clip_alpha if config.qk_clip is not None else None,
        "muon_include": list(config.muon_include),
        "muon_exclude": list(config.muon_exclude),
        "muon_homes": config.homes,
        "muon_split_matrices": config.split_matrices,
        "muon_rank_tflops": config.rank_tflops,
        "muon_link_gbytes": config.link_gbytes,
        "muon_node_ranks": config.node_ranks,
        "muon_dp_layout": getattr(args, "muon_dp_layout", None) or "contiguous",
        "muon_early_param_gather": config.early_param_gather,
        "muon_round_mib": (config.round_bytes or 0) >> 20,
        "muon_from_adamw": getattr(args, "muon_from_adamw", None) or "refuse",
        "adamw_from_muon": False,
        "muon_ns_dtype": config.ns_dtype or "auto",
        "muon_ns_coefficients": spelled(named),
        "muon_ns_iteration": config.ns_iteration,
        "muon_ns_batch": config.ns_batch or 0,
        "muon_elementwise": config.elementwise,
        "no_muon_checkpoint_digest": not config.checkpoint_digest,
        "muon_nonfinite_limit": config.nonfinite_limit,
        "muon_log_interval": config.log_interval,
        "muon_log_file": config.log_file,
        "muon_defaults": getattr(args, "muon_defaults", None) or "moonlight",
        "muon_backend": "plugin",
        "muon_cpu": bool(getattr(args, "muon_cpu", None)),
        "muon_trace_steps": getattr(args, "muon_trace_steps", None) or "",
        "muon_trace_dir": getattr(args, "muon_trace_dir", None) or "",
    }


def given_on(parser: argparse.ArgumentParser, line: Sequence[str]) -> list[str]:
    """The options of Muon's on a command line, and ``--optimizer muon``.

    Args:
        parser: one that ``add_flags`` completed; it also has Megatron's own Muon flags.
        line: the words of the command line.
    """
    known = {flag.option for flag in FLAGS} | {
        option for option in parser._option_string_actions if option.startswith("--muon-")
    }
    options = [word for word in line if word.split("=")[0] in known]
    pairs = itertools.pairwise(line)
    if "--optimizer=muon" in line or ("--optimizer", "muon") in pairs:
        options.insert(0, "--optimizer muon")
    return options
