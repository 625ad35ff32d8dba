"""The flags of ``megatron-muon bench step``: its own, and those of Megatron-LM that it reads.

It reads Megatron-LM's flags of the model, its ranks and its buckets. It refuses flags by name:
those that would change the step or have no effect, and those that its own flags replace.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_muon.lab.bench.muon_flags import HOMES, add_settings
from megatron_muon.lab.dry_run.numbers import MOST_HERE, count, positive, up_to
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.update import MOST_STEPS

ROWS = (
    *("adamw", "muon-contiguous", "muon-bucketed", "muon-paper", "upstream-layerwise"),
    *("muon-contiguous-auto", "muon-bucketed-auto"),
)
_DESCRIPTION = """\
Start ranks on this machine, with a GPU per rank over NCCL, or without GPUs over gloo. Build the
same GPT for every row. In each round every row takes one optimizer step on the same weights and
gradients; the order of the rows rotates from round to round."""

_EPILOG = """\
rows:
  adamw               Megatron's AdamW with its DistributedOptimizer
  muon-contiguous     this package's Muon, one bucket per grad buffer; from core 0.18 on ordered so
                      that shards cut few parameters (align_shards, --muon-dp-layout), as in a run
  muon-bucketed       the same on Megatron's stock buckets, as with --overlap-grad-reduce: closed at
                      a fifth of a layer, as 40 M elements are of Llama-3-8B, or --ddp-bucket-size
  muon-paper          Algorithm 1 of arXiv 2502.16982, stock buckets: every rank that holds a piece
                      of a matrix gathers and orthogonalizes it
  upstream-layerwise  Megatron's own Muon over whole parameters, where it can be imported
  muon-contiguous-auto, muon-bucketed-auto
                      muon-contiguous and muon-bucketed with --muon-ns-iteration auto

A step is optimizer.step(): gradient norm, update, all-gather of the updated parameters. The
reduction of gradients comes before it: its bytes are counted (kind grad_reduce), its time is not.
Memory holds one row at a time. All rows but upstream-layerwise shard by Megatron's
DistributedOptimizer, with or without --use-distributed-optimizer.

All other flags are Megatron-LM's flags of the model and its buckets: --swiglu, --num-experts 8,
--multi-latent-attention, --ddp-bucket-size, ... Flags that not all rows can have are refused.

upstream-layerwise runs the coefficients of the other rows, "simple"; its own default, "quintic",
needs as many products. Up to core 0.17 its gather of parameters has unequal parts, which gloo
cannot gather: there concurrent broadcasts replace it, as they do in the other rows. Ratios to it
are printed with and without that gather.

AdamW on a CPU is megatron_muon.cpu's FusedAdam, in plain torch operations: ratios to it say little
about a GPU.

Exit status: 0; 1 where a rank failed, a file could not be written, or rows of Muon with the same
iteration ended a step with different weights; 2 where the arguments are wrong."""

# Flags of Megatron-LM's, and the flags of this command that replace them.
_OWN = {
    "--tensor-model-parallel-size": "--tp",
    "--pipeline-model-parallel-size": "--pp",
    "--context-parallel-size": "--cp",
    "--expert-model-parallel-size": "--ep",
    "--world-size": "--tp, --pp, --cp and --dp",
    "--hidden-size": "--hidden",
    "--num-layers": "--layers",
    "--num-attention-heads": "--heads",
    "--ffn-hidden-size": "--ffn",
    "--vocab-size": "--vocab",
    "--padded-vocab-size": "--vocab",
    "--seq-length": "--seq",
    "--max-position-embeddings": "--seq",
    "--optimizer": "--rows",
    "--overlap-grad-reduce": "--rows: muon-bucketed and muon-paper have its buckets, others one",
    "--muon-dp-layout": "--rows",
    "--muon-num-ns-steps": "--ns-steps",
    "--muon-ns-steps": "--ns-steps",
}
_GATHER = "a step ends with the all-gather of its updated parameters; --gathers adds other rows"
_STATE = "rows keep what Megatron's AdamW and Muon keep in fp32 on the ranks' own device"
_FP8 = "weights are bf16 in every row, and Muon has no others yet"
_NO_COST = "what a step costs does not depend on it, and rows have one value of it"
_ITERATION = "rows have one Newton-Schulz iteration, ours beside it the one of its -auto rows"
# Flags that not all rows can have, and why.
_REFUSED = {
    "--fp16": "every row is in bf16, the one precision that all of them have",
    "--overlap-param-gather": _GATHER,
    "--muon-early-param-gather": _GATHER,
    "--overlap-param-gather-with-optimizer-step": _GATHER,
    "--use-precision-aware-optimizer": _STATE,
    "--optimizer-cpu-offload": _STATE,
    "--optimizer-cuda-graph": "optimizer='muon' does not support optimizer CUDA graphs yet",
    "--use-megatron-fsdp": "every row is wrapped in Megatron's own DDP",
    "--fp8-param-gather": _FP8,
    "--fp4-param-gather": _FP8,
    **dict.fromkeys(("--lr", "--min-lr", "--weight-decay", "--clip-grad"), _NO_COST),
    **dict.fromkeys(("--adam-beta1", "--adam-beta2", "--adam-eps", "--muon-momentum"), _NO_COST),
    **dict.fromkeys(
        ("--muon-ns-coefficients", "--muon-ns-dtype", "--muon-ns-iteration", "--muon-ns-batch"),
        _ITERATION,
    ),
    "--muon-elementwise": "rows do momentum and update as auto does, on this machine",
}
_LIKE_LLAMA = (
    *("--bf16", "--untie-embeddings-and-output-weights", "--disable-bias-linear"),
    *("--normalization=RMSNorm", "--position-embedding-type=rope", "--transformer-impl=local"),
)


def model_flags(program: str, given: Namespace, of_megatron: Sequence[str]) -> Namespace:
    """Megatron-LM's flags of the model and its ranks.

    Args:
        program: name of the command, for errors.
        given: values of this command's own flags.
        of_megatron: the rest of the command line.

    Raises:
        ValueError: a flag is not known, or cannot be given here; names it and the way out.
    """
    from megatron_muon.lab.dry_run.flags import add_megatron_flags

    _refuse(of_megatron)
    heads = given.heads or max(1, given.hidden // 64)
    sizes = {
        "tensor-model-parallel-size": given.tp,
        "pipeline-model-parallel-size": given.pp,
        "context-parallel-size": given.cp,
        "expert-model-parallel-size": given.ep,
        "world-size": given.tp * given.pp * given.cp * given.dp,
        "hidden-size": given.hidden,
        "num-layers": given.layers,
        "num-attention-heads": heads,
        "vocab-size": given.vocab,
        "seq-length": given.seq,
        "max-position-embeddings": given.seq,
    }
    if given.ffn is not None:
        sizes["ffn-hidden-size"] = given.ffn
    parser = _ModelParser(prog=program, allow_abbrev=False, add_help=False)
    parser.add_argument("--world-size", type=int)
    add_megatron_flags(parser)
    argv = [f"--{name}={size}" for name, size in sizes.items()]
    flags, unknown = parser.parse_known_args([*argv, *_LIKE_LLAMA, *of_megatron])
    if unknown:
        raise ValueError(
            f"unrecognized arguments: {' '.join(unknown)}: only --help's and Megatron-LM's flags "
            "of a model and its buckets are read here, leave it out"
        )
    _check_values(flags)
    return flags


def _refuse(of_megatron: Sequence[str]) -> None:
    for flag in (token.partition("=")[0] for token in of_megatron):
        if flag in _OWN:
            raise ValueError(f"{flag} is said here by {_OWN[flag]}")
        if flag in _REFUSED:
            raise ValueError(f"{flag} cannot be given here: {_REFUSED[flag]}; leave it out")


def _check_values(flags: Namespace) -> None:
    if None not in (flags.ddp_bucket_size, flags.ddp_num_buckets):
        raise ValueError(
            "--ddp-bucket-size and --ddp-num-buckets say the same in two ways: give one of them"
        )


class _ModelParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def command_parser() -> argparse.ArgumentParser:
    """The parser of this command's own flags, with its help."""
    parser = argparse.ArgumentParser(
        prog="megatron-muon bench step",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    here: dict[str, Any] = {"type": count(most=MOST_HERE), "metavar": "N"}
    ranks = parser.add_argument_group("ranks")
    for name, default, kind in (
        *(("tp", 2, "tensor"), ("pp", 1, "pipeline"), ("dp", 2, "data")),
        *(("cp", 1, "context"), ("ep", 1, "expert")),
    ):
        help = f"{kind} parallel size (%(default)s)"
        ranks.add_argument(f"--{name}", **here, default=default, help=help)
    add_limits(ranks)
    add_model(parser.add_argument_group("model"))
    _add_muon(parser.add_argument_group("what is measured"))
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw bars (png, svg, pdf)")
    out.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="record a Chrome trace of a step of each row, in a folder for each row",
    )
    out.add_argument("--parts", action="store_true", help="print where each row's time goes")
    return parser


def add_limits(group: argparse._ArgumentGroup) -> None:
    """Add the flags on a rank's threads and on the time that all ranks may take."""
    group.add_argument(
        "--threads",
        type=count(most=MOST_HERE),
        metavar="N",
        help="threads per rank (default: cores/ranks)",
    )
    group.add_argument(
        "--minutes",
        type=up_to(100_000, least=0.01),
        default=60,
        metavar="N",
        help="minutes until the command gives up (%(default)s)",
    )


def add_model(group: argparse._ArgumentGroup) -> None:
    """Add the sizes of the model that ``model_flags`` reads."""
    sizes: dict[str, Any] = {"type": count(most=1 << 24), "metavar": "N"}
    group.add_argument("--hidden", **sizes, default=256, help="hidden size (%(default)s)")
    group.add_argument("--layers", **sizes, default=4, help="number of layers (%(default)s)")
    group.add_argument("--seq", **sizes, default=1024, help="tokens of a sequence (%(default)s)")
    group.add_argument(
        "--vocab", **sizes, default=32_000, help="size of the vocabulary (%(default)s)"
    )
    group.add_argument("--heads", **sizes, help="attention heads (default: hidden / 64)")
    group.add_argument("--ffn", **sizes, help="inner size of an MLP (default: 4 x hidden)")


def _add_muon(group: argparse._ArgumentGroup) -> None:
    default = MuonConfig()
    group.add_argument(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=ROWS,
        metavar="ROW",
        help=f"measure only these rows: {', '.join(ROWS)} (default: all)",
    )
    group.add_argument(
        "--exchange",
        nargs="+",
        choices=["none", "naive"],
        default=[],
        help="add rows of muon-contiguous: none puts all matrices into one round, naive gives "
        "every parameter a round of its own",
    )
    group.add_argument(
        "--gathers",
        nargs="+",
        choices=["late", "early"],
        default=[],
        help="add rows of muon-bucketed with --overlap-param-gather, which end when a forward pass "
        "that computes nothing has waited for each bucket: late starts gathers in the forward "
        "pass, early within the step, as runs do by default",
    )
    rounds, steps = count(most=1 << 20), count(most=MOST_STEPS)
    group.add_argument(
        "--rounds", type=rounds, default=7, metavar="N", help="steps of each row (%(default)s)"
    )
    group.add_argument(
        "--ns-steps",
        type=steps,
        default=default.ns_steps,
        metavar="N",
        help="Newton-Schulz iterations (%(default)s)",
    )
    add_settings(group, HOMES)
    group.add_argument(
        "--muon-round-mib",
        type=positive,
        help="cap on a rank's buffers for one round of the exchange, in MiB (default: three times "
        "the buffers of the largest parameter, at least 256)",
    )
    group.add_argument(
        "--muon-tp-mode",
        choices=["duplicated", "blockwise"],
        default="duplicated",
        help="for upstream-layerwise: duplicated gathers over TP and orthogonalizes on every TP "
        "rank, blockwise orthogonalizes each TP rank's slice by itself (%(default)s)",
    )
