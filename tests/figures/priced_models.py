"""Seven models at real sizes, priced: ``cd tests && python -m figures.priced_models
[WORD ...]``.

Prints a table as in docs/plan.md, of the models whose name has one of the words. Every
row is one stage of ``megatron-muon plan`` with the flags below: the first one, or where
there are several the second, which has no embedding. ``safe`` and ``fast`` are presets,
with torch's products and with a library's symmetric kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from figures.stages import stage_of, step_of
from megatron_muon.lab.pricing.presets import H100
from megatron_muon.lab.pricing.step import price_adamw
from megatron_muon.lab.pricing.upstream import TpMode, price_layer_wise
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.settings.update import Preset
from support.virtual_gpu.plans import (
    EP,
    LLAMA_8B,
    LLAMA_70B,
    OVERLAP,
    PP,
    QWEN3_30B,
    TP,
)

DEEPSEEK_V3 = (
    "--num-layers 64 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads "
    "128 --kv-channels 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank "
    "512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --swiglu "
    "--normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --padded-vocab-size 129280 --num-experts "
    "256 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
    "--moe-router-topk 8 --position-embedding-type rope --seq-length 4096 "
    "--max-position-embeddings 4096 --bf16 --use-distributed-optimizer "
    "--pipeline-model-parallel-size 16 --expert-model-parallel-size 64 "
)


@dataclass(frozen=True, slots=True)
class Case:
    """A run, and the pipeline stage that is priced."""

    name: str
    flags: str
    stage: int = 0

    @property
    def words(self) -> str:
        return f"{self.flags} {OVERLAP} --stage {self.stage} "


CASES = (
    Case("Llama-3-8B TP1 × DP8", LLAMA_8B + "--world-size 8"),
    Case("Llama-3-8B TP2 × DP4", LLAMA_8B + f"{TP} 2 --world-size 8"),
    Case("Llama-3-8B TP8 × DP8", LLAMA_8B + f"{TP} 8 --world-size 64"),
    Case("Llama-3-8B TP8 × DP64", LLAMA_8B + f"{TP} 8 --world-size 512"),
    Case("Llama-3-70B TP8 PP4 DP16", LLAMA_70B + f"{TP} 8 {PP} 4 --world-size 512", 1),
    Case("Qwen3-30B-A3B EP8, 32 GPUs", QWEN3_30B + f"{EP} 8 --world-size 32"),
    Case("DeepSeek-V3 PP16 EP64, 1,024 GPUs", DEEPSEEK_V3 + "--world-size 1024", 1),
)


HEAD = (
    "| ms | AdamW | safe | with kernel | fast | with kernel | upstream blockwise / "
    "duplicated / distributed / layer_sharded | with syrk |"
)


def main() -> None:
    """Print a row as soon as it is priced."""
    print(f"{HEAD}\n|---|{'--:|' * 7}")
    for case in chosen(CASES):
        print(f"| {' | '.join([case.name, *_cells(case.words)])} |", flush=True)


def chosen(cases: Iterable[Case]) -> Iterator[Case]:
    """Those whose name has one of the command line's words; all where it has none."""
    words = sys.argv[1:]
    for case in cases:
        if not words or any(word in case.name for word in words):
            yield case


def _cells(words: str) -> Iterator[str]:
    config, whole = stage_of(f"{words} --muon-split-matrices off")
    yield _ms(price_adamw(whole, H100))
    for preset in get_args(Preset):
        own = f"{words} --muon-preset {preset}"
        yield _ms(step_of(own).seconds)
        yield _ms(step_of(own, "cuda_symmetric").seconds)
    devices: tuple[Device, ...] = "cuda", "cuda_symmetric"
    for device in devices:
        times = [
            price_layer_wise(whole, config, H100, mode, device)[0].seconds
            for mode in get_args(TpMode)
        ]
        yield " / ".join(map(_ms, times)) if len(set(times)) > 2 else _ms(times[1])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


if __name__ == "__main__":
    main()
