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
    flags_of_upstream,
    foreign_flags,
    megatron_defaults,
    upstream_settings,
    written,
)
from megatron_muon.settings.rules import MATCHED
from megatron_muon.settings.run_flags import FLAGS, OF_ADAMW, OF_ANY, RUN_ROWS


def parsed() -> Any:
    """Megatron-LM's arguments of this run, once they are parsed."""
    return importlib.import_module("megatron.training").get_args()


def is_on(args: Any) -> bool:
    """Whether the run is Muon's; True only after ``validate_args``."""
    return bool(getattr(args, "megatron_muon", False))


def refuse_megatrons_names(args: Namespace) -> None:
    """Refuse, by a ValueError, the names of Megatron's own Muon, with what to give."""
    if args.optimizer == "adaptive_muon":
        raise ValueError(f"--optimizer adaptive_muon: {ADAPTIVE}")
    if args.optimizer == "dist_muon":
        flags = flags_of_upstream(megatron_defaults(args))
        theirs = f", and for the defaults of Megatron's own Muon {flags}" * bool(flags)
        raise ValueError(
            "--optimizer dist_muon is a name of Megatron's own Muon: give --optimizer "
            f"muon --use-distributed-optimizer{theirs}; --muon-backend upstream leaves "
            "it to Megatron's own"
        )


def remove_flags(args: Namespace) -> None:
    """Make ``args`` what it is without the plugin, for a run that is not this package's
    Muon.

    Megatron's own flags keep the given value or get Megatron's default; the plugin's
    are removed. A second call has no effect.

    Raises:
        ValueError: a flag is given that only the plugin has and that would be ignored;
            or Megatron's own Muon is asked for, which this Megatron has not.
    """
    if not hasattr(args, KEPT):
        return
    kept = set(megatron_defaults(args))
    run = f"--optimizer {args.optimizer}"
    instead = "give --optimizer muon"
    if args.optimizer in MUONS:
        run += " --muon-backend upstream"
        instead = "leave out --muon-backend"
        if not any(upstream_settings(megatron_defaults(args))):
            raise ValueError(
                f"{run}: this Megatron has no Muon of its own (core 0.16 and later "
                f"have); {instead}"
            )
        kept.add("muon_backend")
    kept |= {dest for dest in OF_ANY if written(args, dest)}
    if args.optimizer == "adam":
        kept |= {dest for dest, beside in OF_ADAMW.items() if written(args, beside)}
    foreign = foreign_flags(args, kept)
    if foreign:
        raise ValueError(
            f"{', '.join(foreign)} is for megatron_muon's --optimizer muon, and this "
            f"run has {run}: leave it out, or {instead}"
        )
    restore_defaults(args)
    for dest in {flag.dest for flag in FLAGS} - kept:
        if hasattr(args, dest):
            delattr(args, dest)
    delattr(args, KEPT)


def restore_defaults(args: Namespace) -> None:
    """Set Megatron's own default again for every flag that was not given.

    Call it after ``muon_config``, which must know the flags that were given.
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
    if hasattr(args, "muon_tp_mode"):
        args.muon_tp_mode = "duplicated"
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
    if config.scale_mode not in MATCHED:
        values["muon_matched_adamw_rms"] = None
    if config.qk_clip is None:
        values["muon_qk_clip_alpha"] = None
    return values


def leaves_buckets(args: Namespace) -> bool:
    """Whether flags leave the number of buckets to the plugin, which chooses it once
    the model is there (``mcore.wiring.buffers.bucket_layout``).
    """
    if args.muon_dp_layout == "bucketed" or not args.overlap_grad_reduce:
        return False
    if args.ddp_num_buckets is not None or args.ddp_bucket_size is not None:
        return False
    # with this Megatron makes one bucket of each buffer
    return not getattr(args, "overlap_param_gather_with_optimizer_step", False)
