"""The flags of ``megatron-muon plan``."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.dry_run.flags import not_read, split_known
from megatron_muon.lab.dry_run.not_built import why_another_model
from megatron_muon.lab.dry_run.numbers import MOST_RANKS, MOST_THINGS, count, up_to
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.presets import PRESETS, hardware_of
from megatron_muon.lab.pricing.training import MFU
from megatron_muon.lab.routes.model_flags import add_model_flags
from megatron_muon.orthogonalize.iteration import Device

PROGRAM = "megatron-muon plan"
_DESCRIPTION = """\
Say what Muon will cost in a run that has not started: bytes, messages, work, memory and time of an
optimizer step in both layouts, beside AdamW, the paper's algorithm and Megatron's own Muon. The
model and its ranks are given by Megatron-LM's own flags, and the exchange plans are those of the
run. Times are a time model's on stated hardware. Nothing is measured; neither a GPU nor a launcher
is needed. Every assumption is printed with its source and can be set. docs/plan.md explains it."""
DP = "dp"  # a sweep over it multiplies the ranks
# Short names of a sweep's flags; any other name is a flag without its dashes.
SHORT = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "batch": "global-batch-size",
}
DEVICES: dict[str, Device] = {"torch": "cuda", "kernel": "cuda_symmetric"}


def parser(config_class: type) -> argparse.ArgumentParser:
    """Its own flags, Muon's and Megatron's.

    Args:
        config_class: Megatron's TransformerConfig.
    """
    made = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} FLAGS --world-size N [--hardware NAME|FILE] (--help lists them)",
        description=_DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--world-size", type=count(most=MOST_RANKS), metavar="N", help="number of ranks"
    )
    made.add_argument(
        "--hardware",
        default="h100",
        metavar="NAME|FILE",
        help=f"the GPUs: {', '.join(PRESETS)}, or a JSON file of constants (%(default)s)",
    )
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value of a constant of --hardware; may be given several times",
    )
    made.add_argument(
        "--node-size",
        type=count(most=MOST_RANKS),
        metavar="N",
        help="ranks of a node: --set gpus_per_node=N --muon-node-ranks N",
    )
    made.add_argument(
        "--products",
        choices=DEVICES,
        default="torch",
        help="symmetric products: torch's, or the kernel of quack-kernels (%(default)s)",
    )
    _add_run(made)
    add_model_flags(made, config_class)
    return made


def _add_run(made: argparse.ArgumentParser) -> None:
    """Add the options on the run, on what of it is planned, and on the output."""
    made.add_argument("--global-batch-size", type=count(), metavar="N", help="sequences of a step")
    made.add_argument(
        "--mfu",
        type=up_to(1.0, 0.001),
        metavar="SHARE",
        help=f"share of the peak that forward and backward reach ({MFU})",
    )
    made.add_argument(
        "--stage", type=count(0, MOST_THINGS), metavar="N", help="only this pipeline stage"
    )
    made.add_argument(
        "--sweep",
        metavar="NAME=VALUE,...",
        help="plan the run at several values of dp, tp, pp, cp, ep, batch, or of a flag, written "
        "without its dashes; none leaves the flag out, given is for a flag without a value",
    )
    made.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw --sweep (png, svg, pdf; needs matplotlib)"
    )
    made.add_argument(
        "--explain",
        action="store_true",
        help="say why these homes and buckets, and plan other settings that may be cheaper",
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures and assumptions")


def parsed(
    made: argparse.ArgumentParser, argv: Sequence[str], config_class: type
) -> tuple[Namespace, list[str]]:
    """The flags, and notes on those that are not read.

    Raises:
        SystemExit: argparse refuses one, or one is of a model that is not built here.
    """
    known, unknown = split_known(made, argv)
    given = made.parse_args(known)
    for flag in unknown:
        if reason := why_another_model(flag):
            made.error(reason)
    notes = [not_read(made, unknown, config_class)] if unknown else []
    if given.world_size is None and not (given.sweep or "").startswith("dp="):
        made.error("the following arguments are required: --world-size (or --sweep dp=...)")
    if given.sweep is not None:
        _require_read(made, given.sweep, config_class)
    if given.plot is not None and given.sweep is None:
        made.error("--plot draws the curves of --sweep: give both")
    if given.explain and given.sweep is not None:
        made.error("--explain is about one run: leave --sweep out")
    if given.node_size is not None and given.muon_node_ranks is None:
        given.muon_node_ranks = given.node_size
    return given, notes


def _require_read(made: argparse.ArgumentParser, sweep: str, config_class: type) -> None:
    """End where a sweep is over a flag that is not read: all its plans would be the same."""
    name = sweep.partition("=")[0].removeprefix("--")
    if name == DP or not name:
        return
    _, unknown = split_known(made, [f"--{SHORT.get(name, name)}", "1"])
    if unknown:
        made.error(f"--sweep {sweep}: {not_read(made, unknown, config_class)}")


def hardware_given(given: Namespace) -> Hardware:
    """The hardware that the flags state.

    Raises:
        ValueError, TypeError, OSError: see ``hardware_of``.
    """
    settings = list(given.set)
    if given.node_size is not None:
        settings.append(f"gpus_per_node={given.node_size}")
    return hardware_of(given.hardware, settings)
