"""Seven models at real sizes, priced: ``cd tests && python -m figures.priced_models [WORD ...]``.

Prints a table as in docs/plan.md, of the models whose name has one of the words. Every row is
one stage of ``megatron-muon plan`` with the flags below: the first one, or where there are several
the second, which has no embedding. Rounds, launches, Newton-Schulz and what is exposed, of
the rank that has most of it, are those of ours with ``auto`` and a library's symmetric kernel;
beside it is the same in bf16, which takes more restarts of the Gram iteration.
``--assume`` prices what no code here does: see ``ASSUMED``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from figures.priced_stages import priced_of
from megatron_muon.lab.pricing import kernels
from megatron_muon.lab.pricing.presets import hardware_of
from megatron_muon.orthogonalize import numerics
from megatron_muon.runtime.patches import replaced
from megatron_muon.settings.config import MuonConfig
from support.virtual_gpu.plans import LLAMA_8B, LLAMA_70B, OVERLAP, QWEN3_30B

DEEPSEEK_V3 = (
    "--num-layers 64 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--kv-channels 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
    "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --padded-vocab-size 129280 "
    "--num-experts 256 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
    "--moe-router-topk 8 --position-embedding-type rope --seq-length 4096 "
    "--max-position-embeddings 4096 --bf16 --use-distributed-optimizer "
    "--pipeline-model-parallel-size 16 --expert-model-parallel-size 64 "
)
ASSUMED = {
    "one-restart": "one restart of the Gram iteration in bf16, where fp16 has one",
    "no-copies": "linear terms that are added without a copy",
}
TP = "--tensor-model-parallel-size"


@dataclass(frozen=True, slots=True)
class Case:
    """A run, and the pipeline stage that is priced."""

    name: str
    words: str
    stage: int = 0


CASES = (
    Case("Llama-3-8B TP1 × DP8", LLAMA_8B + "--world-size 8"),
    Case("Llama-3-8B TP2 × DP4", LLAMA_8B + f"{TP} 2 --world-size 8"),
    Case("Llama-3-8B TP8 × DP8", LLAMA_8B + f"{TP} 8 --world-size 64"),
    Case("Llama-3-8B TP8 × DP64", LLAMA_8B + f"{TP} 8 --world-size 512"),
    Case(
        "Llama-3-70B TP8 PP4 DP16",
        LLAMA_70B + f"{TP} 8 --pipeline-model-parallel-size 4 --world-size 512",
        1,
    ),
    Case(
        "Qwen3-30B-A3B EP8, 32 GPUs", QWEN3_30B + "--expert-model-parallel-size 8 --world-size 32"
    ),
    Case("DeepSeek-V3 PP16 EP64, 1,024 GPUs", DEEPSEEK_V3 + "--world-size 1024", 1),
)


def main() -> None:
    """Print a row as soon as it is priced."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--flags", default="", help="further flags of megatron-muon plan")
    parser.add_argument("--assume", nargs="*", choices=ASSUMED, default=[])
    given = parser.parse_args()
    with assuming(given.assume):
        print_table(given)


@contextlib.contextmanager
def assuming(names: Sequence[str]) -> Iterator[None]:
    """Within it the time model prices some of ``ASSUMED``."""
    known = numerics._segments

    def one_restart(config: MuonConfig, steps: Any, kind: str) -> numerics.Segments:
        return known(config, steps, "fp16" if kind == "bf16" else kind)

    changes = {
        "one-restart": (numerics, {"_segments": one_restart}),
        "no-copies": (kernels._Products, {"_copy": lambda products, elements: kernels.Cost()}),
    }
    with contextlib.ExitStack() as stack:
        kernels.newton_schulz.cache_clear()
        stack.callback(kernels.newton_schulz.cache_clear)
        for name in names:
            owner, attributes = changes[name]
            stack.enter_context(replaced(owner, **attributes))
        yield


def print_table(given: argparse.Namespace) -> None:
    """A row for each model whose name has one of ``given.words``."""
    hardware = hardware_of(given.hardware, given.set)
    print("| ms | AdamW | ours standard | with kernel | ours auto | with kernel | in bf16", end="")
    print(
        " | rounds | launches | NS busiest / mean | exposed | upstream duplicated / distributed |"
    )
    print("|---|" + "--:|" * 11)
    for case in CASES:
        if given.words and not any(word in case.name for word in given.words):
            continue
        words = f"{case.words} {OVERLAP} --stage {case.stage} {given.flags}".split()
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bf16 = {"ns_iteration": "auto", "ns_dtype": "bf16"}
            (stage,), _ = priced_of(words, hardware, bf16)
        *ours, _, in_bf16 = stage.ours  # of which the one before is without the kernel
        steps = [our.step for our in (*ours, in_bf16)]
        last = ours[-1].step
        cells = [case.name, _ms(stage.adamw), *(_ms(step.seconds) for step in steps)]
        cells += ["+".join(map(str, last.rounds)), f"{last.launches:,}"]
        cells.append(f"{_ms(last.newton_schulz_busiest)} / {_ms(last.newton_schulz_mean)}")
        cells.append(_ms(last.exposed_most))
        distributed = "–" if stage.distributed == stage.duplicated else _ms(stage.distributed)
        cells.append(f"{_ms(stage.duplicated)} / {distributed}")
        print(f"| {' | '.join(cells)} |", flush=True)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


if __name__ == "__main__":
    main()
