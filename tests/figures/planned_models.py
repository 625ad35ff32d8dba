"""Six models at 32 to 4,096 ranks: ``cd tests && python -m figures.planned_models [WORD ...]``.

Prints the table of docs/plan.md, of the models whose name has one of the words. Every row is
``megatron-muon plan`` with the flags below. Sizes are those of each model's config.json; how its
ranks are divided is an assumption, as is the number of tokens in a step.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import megatron_muon.cpu.on  # noqa: F401 before what imports Megatron
from megatron_muon.lab.plan.options import DEVICES, hardware_given, parsed, parser
from megatron_muon.lab.plan.rows import Name
from megatron_muon.lab.plan.run import RunPlan, plan_run
from megatron_muon.lab.routes.model_flags import imported_config_class
from support.models.model_flags import DEEPSEEK_V3 as DEEPSEEK_V3_WORDS
from support.virtual_gpu.plans import LLAMA_8B, LLAMA_70B, OVERLAP, QWEN3_30B

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
EP = "--expert-tensor-parallel-size 1 --expert-model-parallel-size"
_MLA = (
    "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --qk-layernorm --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --padded-vocab-size 163840 --moe-grouped-gemm "
    "--position-embedding-type rope --bf16 --use-distributed-optimizer "
)
_DEEPSEEK_V3 = " ".join(DEEPSEEK_V3_WORDS).split("--expert-model-parallel-size", maxsplit=1)[0]
DEEPSEEK_V3 = f"{_DEEPSEEK_V3} --global-batch-size 15360 "  # arXiv 2412.19437, section 4.2
KIMI_K2 = _MLA + (  # 67 M tokens: arXiv 2507.20534
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 64 "
    "--q-lora-rank 1536 --num-experts 384 --moe-ffn-hidden-size 2048 --moe-router-topk 8 "
    "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*1+[1]*60) "
    "--seq-length 4096 --global-batch-size 16384 "
    f"{PP} 16 --decoder-last-pipeline-num-layers 1 "
)
MOONLIGHT = _MLA + (
    "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 11264 --num-attention-heads 16 "
    "--num-experts 64 --moe-ffn-hidden-size 1408 --moe-router-topk 6 "
    "--moe-shared-expert-intermediate-size 2816 --moe-layer-freq ([0]*1+[1]*26) "
    "--seq-length 8192 "
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and ``(ranks, further flags, how they are divided)`` of each row."""

    name: str
    words: str
    worlds: tuple[tuple[int, str, str], ...]


def _worlds(words: str, name: str, *sizes: int) -> tuple[tuple[int, str, str], ...]:
    return tuple((size, words, name) for size in sizes)


MODELS = (
    Model("Llama-3-8B", LLAMA_8B, _worlds(f"{TP} 2", "TP2", 32, 256, 1024, 4096)),
    Model("Llama-3-70B", LLAMA_70B, _worlds(f"{TP} 8 {PP} 4", "TP8 PP4", 32, 256, 1024, 4096)),
    Model("Qwen3-30B-A3B", QWEN3_30B, _worlds(f"{EP} 8", "EP8", 32, 256, 1024, 4096)),
    Model("Moonlight 16B", MOONLIGHT, _worlds(f"{EP} 8", "EP8", 32, 256, 1024, 4096)),
    Model(
        "DeepSeek-V3",
        DEEPSEEK_V3,
        _worlds(f"{EP} 16", "PP16 EP16", 256) + _worlds(f"{EP} 64", "PP16 EP64", 1024, 4096),
    ),
    Model(
        "Kimi K2",
        KIMI_K2,
        _worlds(f"{EP} 16", "PP16 EP16", 256) + _worlds(f"{EP} 64", "PP16 EP64", 1024, 4096),
    ),
)
HEAD = (
    "| model | ranks | AdamW | contiguous | bucketed | paper's | Megatron's duplicated / "
    "distributed | in node / between, MB | busiest / mean | peak, MiB | longer than AdamW's |"
)


def main() -> None:
    """Print a row as soon as it is planned."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("words", nargs="*")
    arguments.add_argument("--flags", default="", help="further flags of megatron-muon plan")
    given = arguments.parse_args()
    print(f"{HEAD}\n|---|--:|{'--:|' * 9}")
    for model in MODELS:
        if given.words and not any(word in model.name for word in given.words):
            continue
        for line in rows(model, given.flags):
            print(line, flush=True)


def rows(model: Model, more: str) -> Iterator[str]:
    """A line for each of its worlds."""
    for size, words, name in model.worlds:
        argv = f"{model.words} {OVERLAP} {words} --world-size {size} {more}".split()
        yield f"| {model.name} {name} | {size:,} | {' | '.join(_cells(planned(argv)))} |"


def planned(argv: list[str]) -> RunPlan:
    """The plan of a command line."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config_class = imported_config_class("figures.planned_models")
        given, _ = parsed(parser(config_class), argv, config_class)
        return plan_run(given, hardware_given(given), DEVICES[given.products])


def _cells(plan: RunPlan) -> Iterator[str]:
    def ms(name: Name) -> str:
        return f"{1e3 * plan.seconds(name):.1f}" if name in plan.names else "–"

    yield from (ms(name) for name in ("adamw", "contiguous", "bucketed", "paper"))
    yield f"{ms('duplicated')} / {ms('distributed')}"
    slowest = max(plan.kinds, key=lambda kind: kind.row("contiguous").seconds)
    row = slowest.row("contiguous")
    yield f"{row.inside.mean / 1e6:,.0f} / {row.between.mean / 1e6:,.0f}"
    yield f"{slowest.homes.busiest_share:.2f}"
    yield f"{max((kind.row('contiguous').peak or 0) for kind in plan.kinds) / (1 << 20):,.0f}"
    yield f"{plan.slower('contiguous'):+.2%}"


if __name__ == "__main__":
    main()
