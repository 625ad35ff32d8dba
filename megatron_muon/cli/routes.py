"""``megatron-muon routes``: what Muon would do with a model that is given by Megatron's flags."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import get_args

import megatron_muon
from megatron_muon.cli.flags import add_megatron_flags, not_read, split_known
from megatron_muon.cli.muon_flags import (
    add_home_flags,
    add_newton_schulz_flags,
    homes_of,
    newton_schulz_of,
)
from megatron_muon.config import MuonConfig, ScaleMode

_DESCRIPTION = """\
Print every parameter of a GPT model with its shape, how tensor parallelism splits it, its
optimizer, its matrices, their scale and their homes. The model is given by Megatron-LM's own flags:
paste those of a training script; what does not matter here is named on stderr. Nothing is
allocated, and neither a GPU nor a launcher is needed."""

_HOMES = """\
A home is the rank of the pipeline stage that orthogonalizes a matrix. Where several layers or
experts share a line their homes differ, so the line has the number of different homes;
--all and --json have each one."""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0; wrong arguments end the process with status 2, as argparse does.
    """
    with megatron_is_quiet():
        if not megatron_muon.cpu.enabled():
            megatron_muon.cpu.enable(allow_cuda=True)  # nothing here runs on a device
        from megatron.core.transformer import TransformerConfig

        from megatron_muon.cli.model import ranks_of, validated
        from megatron_muon.cli.stages import routes
        from megatron_muon.cli.table import as_json, as_text
        from megatron_muon.training.bucketing import choose_buckets

    parser = _parser(TransformerConfig)
    known, unknown = split_known(parser, argv)
    flags = parser.parse_args(known)
    notes = _notes(flags)
    if unknown:
        notes.append(not_read(parser, unknown, TransformerConfig))
    for note in notes:
        _note(note)
    try:
        config = _muon_config(flags)
        with megatron_is_quiet():
            args = validated(flags, ranks_of(flags))
            chosen = choose_buckets(args)
            flags.ddp_num_buckets = args.ddp_num_buckets
            found = routes(flags, config)
    except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
        parser.error(_said(error))
    for line in chosen:
        _note(line)
    print(
        as_json(found, config, [*notes, *chosen]) if flags.json else as_text(found, every=flags.all)
    )
    return 0


def _note(text: str) -> None:
    print(f"megatron-muon routes: {text}", file=sys.stderr)


@contextmanager
def megatron_is_quiet() -> Iterator[None]:
    """No advice about what nothing here calls, such as Apex; what is printed goes to stderr."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _parser(config_class: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-muon routes",
        usage="megatron-muon routes [--json] [--all] [--world-size N] FLAGS (--help lists them)",
        description=_DESCRIPTION,
        epilog=_HOMES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="as JSON, with every parameter")
    parser.add_argument("--all", action="store_true", help="a line for every layer and expert")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks (default: as few as the sizes allow)"
    )
    _add_muon_flags(parser.add_argument_group("Muon's"))
    add_megatron_flags(parser, config_class)
    return parser


def _add_muon_flags(group: argparse._ArgumentGroup) -> None:
    """Those of the settings that routes follow from, named as the flags of a run."""
    default = MuonConfig()
    for name in ("include", "exclude"):
        group.add_argument(
            f"--muon-{name}",
            action="append",
            default=[],
            metavar="PATTERN",
            help="of parameter names (*, ?, []); may be given several times",
        )
    group.add_argument("--muon-no-split-qkv", action="store_true", help="fused QKV is one matrix")
    group.add_argument(
        "--muon-dp-layout",
        choices=("contiguous", "bucketed"),
        default="contiguous",
        help="how buckets are cut where reduction overlaps, and from core 0.18 on in which order "
        "they are filled; %(default)s",
    )
    add_home_flags(group)
    group.add_argument(
        "--muon-scale-mode",
        choices=get_args(ScaleMode),
        default=default.scale_mode,
        help="%(default)s",
    )
    group.add_argument(
        "--muon-matched-adamw-rms",
        "--muon-extra-scale-factor",
        type=float,
        default=default.matched_adamw_rms,
        help="%(default)s",
    )
    add_newton_schulz_flags(group)


def _muon_config(flags: Namespace) -> MuonConfig:
    from megatron_muon.training.bucketing import aligns_shards

    return MuonConfig(
        muon_include=tuple(flags.muon_include),
        muon_exclude=tuple(flags.muon_exclude),
        split_qkv=not flags.muon_no_split_qkv,
        matched_adamw_rms=flags.muon_matched_adamw_rms,
        scale_mode=flags.muon_scale_mode,
        align_shards=aligns_shards(flags),
        **homes_of(flags),
        **newton_schulz_of(flags),
    )


def _notes(flags: Namespace) -> list[str]:
    """Where what is shown is not to the letter what these flags make."""
    notes = []
    if not flags.use_distributed_optimizer:
        notes.append("shown as with --use-distributed-optimizer, which a run with Muon needs")
    if flags.transformer_impl != "local":
        notes.append(_transformer_engine(flags))
    return notes


def _transformer_engine(flags: Namespace) -> str:
    from megatron_muon.cli.model import has_grouped_weights

    differs = ["a norm that is fused into a linear is shown as a module of its own"]
    if flags.moe_grouped_gemm and not has_grouped_weights(flags):
        differs.append("experts.linear_fc1.weight7 as experts.local_experts.7.linear_fc1.weight")
    text = (
        f"built from Megatron's local modules, not --transformer-impl {flags.transformer_impl}; "
        f"shapes and matrices are the same, but {', and '.join(differs)}, so which weights a "
        "shard's edge cuts, and with it homes, can differ"
    )
    if flags.multi_latent_attention and flags.tensor_model_parallel_size > 1:
        text += (
            "; only linear_q_down_proj and linear_kv_down_proj have another local shape and TP: "
            "Transformer Engine replicates them, here they are split by rows"
        )
    return text


def _said(error: BaseException) -> str:
    """What Megatron says, and where it asserts something without saying why."""
    if str(error):
        return str(error)
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback is not None
    code = traceback.tb_frame.f_code
    return f"{type(error).__name__} in {code.co_name} ({code.co_filename}:{traceback.tb_lineno})"
