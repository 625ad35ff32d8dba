"""The flags of ``megatron-muon plan``."""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.dry_run.numbers import MOST_RANKS, MOST_THINGS, count, up_to
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.presets import PRESETS, hardware_of
from megatron_muon.lab.pricing.training import MFU
from megatron_muon.lab.routes.model_flags import OF_MODELS, CommandLine
from megatron_muon.orthogonalize.numerics import Device

PROGRAM = "megatron-muon plan"
_DESCRIPTION = f"""\
What Muon will cost in a run that has not started: bytes, messages, work, memory
and time of an optimizer step in both layouts, beside AdamW, the paper's
algorithm and Megatron's own Muon.

{OF_MODELS}

The exchange plans are those of the run. Times are a time model's on stated
hardware. Nothing is measured, and neither a GPU nor a launcher is needed.
docs/plan.md explains it."""
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


def command_line(argv: Sequence[str]) -> CommandLine:
    """Read the command's own options; what comes behind them is the run's.

    Raises:
        SystemExit: argparse refuses one, or one does not go with another.
    """
    made = _parser()
    line = CommandLine(made, argv)
    given = line.given
    swept_dp = (given.sweep or "").startswith(f"{DP}=")
    if not (
        given.world_size or getattr(given, "dp", None) or swept_dp or "WORLD_SIZE" in os.environ
    ):
        made.error("the following arguments are required: --world-size (or --sweep dp=...)")
    if given.plot is not None and given.sweep is None:
        made.error("--plot draws the curves of --sweep: give both")
    if given.explain and given.sweep is not None:
        made.error("--explain is about one run: leave --sweep out")
    return line


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [OPTIONS] --world-size N SCRIPT ITS-ARGUMENTS...\n"
        f"       {PROGRAM} [OPTIONS] --model NAME [FLAGS...]",
        description=_DESCRIPTION,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    return made


def hardware_given(given: Namespace) -> Hardware:
    """The hardware that the flags state.

    Raises:
        ValueError, TypeError, OSError: see ``hardware_of``.
    """
    settings = list(given.set)
    if given.node_size is not None:
        settings.append(f"gpus_per_node={given.node_size}")
    return hardware_of(given.hardware, settings)
