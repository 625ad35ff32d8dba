"""The flags of Megatron-LM that describe a GPT, its ranks and its buffers, without its
script.

Only these are read where no script is given: presets change their sizes, and the
benchmark builds small models by them. Everything else is Megatron-LM's own parser's,
see ``script``.
"""

from __future__ import annotations

import argparse
import ast
from typing import Any

from megatron_muon.lab.dry_run.numbers import MOST_THINGS, count, finite, up_to

_SIZES = """
    --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups
    --kv-channels --vocab-size --padded-vocab-size --seq-length
    --max-position-embeddings --moe-ffn-hidden-size --q-lora-rank
    --num-virtual-stages-per-pipeline-rank --ddp-bucket-size --ddp-num-buckets
    --global-batch-size
""".split()
_FROM_ZERO = """
    --num-layers --num-experts --moe-shared-expert-intermediate-size
    --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
""".split()
_SIZES_OF = {
    "--make-vocab-size-divisible-by": 128,
    "--moe-router-topk": 2,
    "--kv-lora-rank": 32,
    "--qk-head-dim": 128,
    "--qk-pos-emb-head-dim": 64,
    "--v-head-dim": 128,
}
_SWITCHES = """
    --group-query-attention --swiglu --untie-embeddings-and-output-weights --bf16
    --fp16 --qk-layernorm --multi-latent-attention --sequence-parallel
    --add-qkv-bias --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --overlap-param-gather-with-optimizer-step
    --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16
    --ddp-pad-buckets-for-high-nccl-busbw --use-precision-aware-optimizer
    --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d
""".split()
_OF_RANKS = {
    "--tensor-model-parallel-size": "--tp",
    "--pipeline-model-parallel-size": "--pp",
    "--context-parallel-size": "--cp",
    "--expert-model-parallel-size": "--ep",
}


def add_rank_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that divide the ranks, with short names, hidden from ``--help``."""

    def add(*names: str, **options: Any) -> None:
        parser.add_argument(*names, help=argparse.SUPPRESS, **options)

    for name, short in _OF_RANKS.items():
        add(name, short, type=count(), default=1)
    add("--expert-tensor-parallel-size", "--etp", type=count())
    add("--num-distributed-optimizer-instances", type=count(), default=1)
    add("--use-tp-pp-dp-mapping", action="store_true")


def add_megatron_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags with Megatron-LM's defaults, hidden from ``--help``."""

    def add(name: str, **options: Any) -> None:
        parser.add_argument(name, help=argparse.SUPPRESS, **options)

    add_rank_flags(parser)
    for name in _SIZES:
        add(name, type=count())
    for name in _FROM_ZERO:
        add(name, type=count(0, MOST_THINGS))
    for name, default in _SIZES_OF.items():
        add(name, type=count(), default=default)
    for name in _SWITCHES:
        add(name, action="store_true")
    add("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    for name in ("--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype"):
        add(name, choices=["fp32", "fp16", "bf16", "fp8"], default="fp32")
    for name in ("--hidden-dropout", "--attention-dropout"):
        add(name, type=finite, default=0.1)
    add("--optimizer-offload-fraction", type=up_to(1.0), default=1.0)
    add("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    positions = ["learned_absolute", "rope"]
    add("--position-embedding-type", choices=positions, default="learned_absolute")
    add("--moe-layer-freq", type=_frequency, default=1)
    add("--transformer-impl", choices=["local"], default="local")


def _frequency(text: str) -> int | list[int]:
    """``--moe-layer-freq``: a number, or an expression of lists such as
    ``[0]*3+[1]*58``.
    """
    try:
        value = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError):
        value = None
    if isinstance(value, int) and 0 < value <= MOST_THINGS:
        return value
    if isinstance(value, list) and value and all(each in (0, 1) for each in value):
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is no number and no list of 0 and 1")


def _evaluated(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluated(each) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left = _evaluated(node.left)
        right = _evaluated(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    raise TypeError(f"{ast.dump(node)} is not of a layer pattern")
