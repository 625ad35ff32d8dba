"""The flags of ``megatron-muon bench step``: its own, and those of Megatron-LM's of a
model.
"""

from __future__ import annotations

import argparse
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.dry_run.flags import add_megatron_flags
from megatron_muon.lab.dry_run.numbers import MOST_HERE, count, positive
from megatron_muon.lab.outputs import add_outputs, parser_of

ROWS = (
    "adamw",
    "muon-contiguous",
    "muon-bucketed",
    "upstream-blockwise",
    "upstream-duplicated",
    "upstream-distributed",
    "muon-contiguous-auto",
    "muon-bucketed-auto",
)
_DESCRIPTION = """\
Start ranks on this machine, with a GPU per rank over NCCL, or without GPUs over
gloo. Build the same GPT for every row. In each round every row takes one
optimizer step on the same weights and gradients; the rows' order rotates."""

_EPILOG = """\
rows:
  adamw               Megatron's AdamW with its DistributedOptimizer
  muon-contiguous     this package's Muon, one bucket per grad buffer
  muon-bucketed       the same on Megatron's buckets (a fifth of a layer, which
                      40 M elements are of Llama-3-8B's, or --ddp-bucket-size)
  upstream-blockwise  Megatron's own Muon, where it can be imported, with its
                      default up to core 0.19. Other mathematics: each TP rank
                      orthogonalizes its slice by itself
  upstream-duplicated, upstream-distributed
                      the same with whole matrices, by --muon-tp-mode; only
                      the first is measured by default, and at TP 1
  muon-contiguous-auto, muon-bucketed-auto
                      with --muon-ns-iteration auto; the others are standard

A step is optimizer.step(): gradient norm, update, all-gather of parameters. All
rows but upstream's shard by Megatron's DistributedOptimizer. On a CPU,
AdamW is megatron_muon.cpu's, in plain torch operations.

Sizes are given as --tp --pp --cp --ep --dp --hidden --layers --heads --ffn
--vocab --seq, or by Megatron-LM's names; other flags are Megatron-LM's flags of
a GPT and its buckets: --swiglu, --num-experts 8, --ddp-bucket-size N, ...

Exit status: 0; 1 where a rank failed, a file could not be written, or rows of
Muon with one iteration ended a step with different weights; 2 where arguments
are wrong."""
# By their short name: what Megatron-LM calls it, and its default.
_SIZES = {
    "hidden": ("hidden_size", 256),
    "layers": ("num_layers", 4),
    "heads": ("num_attention_heads", None),  # hidden / 64
    "ffn": ("ffn_hidden_size", None),
    "vocab": ("vocab_size", 32_000),
    "seq": ("seq_length", 1024),
}
_LIKE_LLAMA = {
    "bf16": True,
    "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}
# Flags that not all rows can have, and why.
_REFUSED = {
    "fp16": "every row is in bf16, the one precision that all of them have",
    "overlap_grad_reduce": "muon-bucketed has its buckets, others one",
    "overlap_param_gather": "a step ends with its all-gather of parameters",
    "overlap_param_gather_with_optimizer_step": (
        "a step ends with its all-gather of parameters"
    ),
}


def parsed(argv: Sequence[str], program: str = "megatron-muon bench step") -> Namespace:
    """Megatron-LM's flags of the model and its ranks, and the command's own, as
    argparse has them.

    Wrong ones end the process with status 2.
    """
    parser = command_parser(program)
    flags = parser.parse_args(argv)
    for name, why in _REFUSED.items():
        if getattr(flags, name):
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} cannot be given here: {why}; remove it")
    if None not in (flags.ddp_bucket_size, flags.ddp_num_buckets):
        parser.error("--ddp-bucket-size and --ddp-num-buckets: use only one of the two")
    flags.num_attention_heads = flags.num_attention_heads or max(
        1, flags.hidden_size // 64
    )
    if flags.rows is None:  # at TP 1 all modes of upstream's are one
        several = flags.tensor_model_parallel_size > 1
        left_out = {"upstream-distributed", "" if several else "upstream-blockwise"}
        flags.rows = [row for row in ROWS if row not in left_out]
    flags.max_position_embeddings = flags.seq_length
    sizes = (flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size)
    flags.world_size = math.prod((flags.dp, flags.context_parallel_size, *sizes))
    if flags.world_size > MOST_HERE:
        parser.error(
            f"TP x PP x CP x DP are {flags.world_size} ranks, at most {MOST_HERE} here"
        )
    return flags


def command_parser(program: str) -> argparse.ArgumentParser:
    """The parser of all flags; ``--help`` lists the command's own."""
    usage = f"{program} [OPTIONS] [SIZES] [MEGATRON-LM'S FLAGS]"
    parser = parser_of(program, _DESCRIPTION, usage=usage, epilog=_EPILOG)
    add_megatron_flags(parser)
    for name, (of_megatron, _) in _SIZES.items():
        kind = count(most=1 << 24)
        parser.add_argument(
            f"--{name}", type=kind, dest=of_megatron, help=argparse.SUPPRESS
        )
    ranks = count(most=MOST_HERE)
    parser.add_argument("--dp", type=ranks, default=2, help=argparse.SUPPRESS)
    parser.set_defaults(
        tensor_model_parallel_size=2, **dict(_SIZES.values()), **_LIKE_LLAMA
    )
    add = parser.add_argument
    text = "threads per rank (default: cores/ranks)"
    add("--threads", type=ranks, metavar="N", help=text)
    text = "steps of each row (%(default)s)"
    add("--rounds", type=count(most=1 << 20), default=7, metavar="N", help=text)
    text = "measure only these rows"
    add("--rows", nargs="+", choices=ROWS, metavar="ROW", help=text)
    text = (
        "add rows of muon-contiguous: with one round (none), or one for each "
        "parameter (naive)"
    )
    add("--exchange", nargs="+", choices=["none", "naive"], default=[], help=text)
    text = "cap on a rank's buffers for one round of the exchange, in MiB"
    add("--muon-round-mib", type=positive, metavar="MIB", help=text)
    add("--parts", action="store_true", help="print where each row's time goes")
    text = "record a Chrome trace of a step of each row, in a folder for each row"
    add("--traces", type=Path, metavar="FOLDER", help=text)
    add_outputs(parser)
    return parser
