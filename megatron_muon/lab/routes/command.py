"""``megatron-muon routes``: matrices and homes of a model that Megatron's flags describe."""

from __future__ import annotations

import argparse
import importlib
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_muon.config import MuonConfig
from megatron_muon.lab.dry_run.flags import not_read, split_known
from megatron_muon.lab.dry_run.hybrid.settings import is_hybrid
from megatron_muon.lab.dry_run.not_built import why_another_model
from megatron_muon.lab.dry_run.numbers import MOST_RANKS, count
from megatron_muon.lab.routes.model_flags import (
    REFUSALS,
    add_model_flags,
    imported_config_class,
    megatron_is_quiet,
    said,
    settled,
    stop,
)
from megatron_muon.megatron_lm.launch import MixedInstallationError, check_installation

_DESCRIPTION = """\
Print every parameter of a model with its shape, how tensor parallelism cuts it, its optimizer,
its matrices, their scale and their homes. The model is a GPT or a hybrid (Mamba) model and is given
by Megatron-LM's own flags: paste those of a training script. Flags of another model are an error;
flags that do not matter here are named on stderr. Nothing is allocated, and neither a GPU nor a
launcher is needed."""

_HOMES = """\
A home is the rank of the pipeline stage that orthogonalizes a matrix. A line for several layers or
experts gives the number of different homes; --all and --json give each home. The homes are those
of GPUs without quack-kernels: with it symmetric products cost less, so some homes can differ."""
_PROGRAM = "megatron-muon routes"


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0; wrong arguments end the process with status 2, as argparse does.
    """
    arguments = list(argv)
    if arguments and not arguments[0].startswith("-"):
        _import_from(Path(arguments.pop(0)))
    config_class = imported_config_class(_PROGRAM)
    parser = _parser(config_class)
    known, unknown = split_known(parser, arguments)
    flags = parser.parse_args(known)
    for flag in unknown:
        if reason := why_another_model(flag):
            parser.error(reason)
    try:
        routed, config, notes = _routed(flags)
    except REFUSALS as error:
        parser.error(said(error))
    if unknown:
        notes.append(not_read(parser, unknown, config_class))
    for note in notes:
        _note(note)
    from megatron_muon.lab.dry_run.table import as_json, as_text

    core = _core()
    print(
        as_json(routed, config, notes, core)
        if flags.json
        else as_text(routed, core, every=flags.all)
    )
    return 0


def _routed(flags: Namespace) -> tuple[Any, MuonConfig, list[str]]:
    """The routes, the settings, and the notes to print."""
    from megatron_muon.lab.dry_run.stages import routes

    run = settled(flags)
    notes = _notes(flags) + run.notes
    with megatron_is_quiet():
        return routes(flags, run.config), run.config, notes


def _import_from(checkout: Path) -> None:
    """Make Python import Megatron from a checkout, as a script in it does."""
    try:
        sys.path.insert(0, str(checkout.resolve()))
        check_installation(checkout)
    except MixedInstallationError as error:
        stop(str(error), _PROGRAM)


def _core() -> Any:
    from megatron_muon.lab.dry_run.table import Core
    from megatron_muon.mcore.seams.rows import megatron_version

    package = importlib.import_module("megatron.core")
    return Core(megatron_version()[0], str(Path(package.__path__[0]).resolve()))


def _note(text: str) -> None:
    print(f"megatron-muon routes: {text}", file=sys.stderr)


def _parser(config_class: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} [CHECKOUT] [--json] [--all] [--world-size N] FLAGS (--help lists them)",
        description=_DESCRIPTION,
        epilog=_HOMES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument_group(
        "CHECKOUT",
        "Megatron-LM's folder with pretrain_gpt.py; comes first (default: the Megatron that Python "
        "finds)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every parameter")
    parser.add_argument(
        "--all", action="store_true", help="print a line for every layer and expert"
    )
    parser.add_argument(
        "--world-size",
        type=count(most=MOST_RANKS),
        metavar="N",
        help="number of ranks (default: as few as the sizes allow)",
    )
    add_model_flags(parser, config_class)
    return parser


def _notes(flags: Namespace) -> list[str]:
    """Notes on the differences between the shown model and the one that a run builds."""
    notes = []
    if not flags.use_distributed_optimizer:
        notes.append("shown as with --use-distributed-optimizer, which a run with Muon needs")
    from megatron_muon.lab.dry_run.hybrid.gated_delta import variant_of

    if is_hybrid(flags):
        notes.append("the model is Megatron's hybrid model, as pretrain_mamba.py trains it")
    if flags.transformer_impl != "local" or is_hybrid(flags) or variant_of(flags):
        notes.append(_transformer_engine(flags))
    return notes


def _transformer_engine(flags: Namespace) -> str:
    from megatron_muon.lab.dry_run.model import has_grouped_weights

    differs = ["a norm that is fused into a linear is shown as a module of its own"]
    if flags.moe_grouped_gemm and not has_grouped_weights(flags):
        differs.append("experts.linear_fc1.weight7 as experts.local_experts.7.linear_fc1.weight")
    text = (
        f"built from Megatron's local modules, not {_instead(flags)}; "
        f"shapes and matrices are the same, but {', and '.join(differs)}, so which weights a "
        "shard's edge cuts, and with it homes, can differ"
    )
    if flags.multi_latent_attention and flags.tensor_model_parallel_size > 1:
        text += (
            "; only linear_q_down_proj and linear_kv_down_proj have another local shape and TP: "
            "Transformer Engine replicates them, here they are split by rows"
        )
    return text


def _instead(flags: Namespace) -> str:
    """The modules with which a run builds the model, in words."""
    from megatron_muon.lab.dry_run.hybrid.gated_delta import variant_of

    if is_hybrid(flags) or variant_of(flags):
        return "Transformer Engine's, which such layers are made of in a run"
    return f"--transformer-impl {flags.transformer_impl}"
