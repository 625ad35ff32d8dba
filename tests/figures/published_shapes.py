"""Published hybrids and other models of 2026 in ``plan``, built by Megatron-LM's own
scripts.

``cd tests && MEGATRON_LM_PATH=CHECKOUT python -m figures.published_shapes [WORD ...]``
prints a row for each model whose name has one of the words: its parameters beside the
published number, Muon's share of them, and optimizer steps in ms. Shapes are those of
the models' cards and configurations.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes import succeeded

_HYBRID = (
    "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec "
    "--mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8 --squared-relu "
    "--vocab-size 131071 --position-embedding-type none --hybrid-layer-pattern"
)
_NANO = "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME"
_SUPER = ("ME" * 5 + "*") * 8
_EXPERTS = "--moe-grouped-gemm --moe-token-dispatcher-type alltoall"
_DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 "
    "--linear-key-head-dim 128 --linear-value-head-dim 128 --linear-num-key-heads 16 "
    "--swiglu --attention-output-gate --qk-layernorm --kv-channels 256 "
    f"--group-query-attention --num-query-groups 2 --moe-shared-expert-gate {_EXPERTS}"
)
_SINKS = (
    "--hidden-size 2880 --num-attention-heads 64 --kv-channels 64 "
    "--group-query-attention --num-query-groups 8 --ffn-hidden-size 2880 "
    "--moe-ffn-hidden-size 2880 --moe-router-topk 4 --softmax-type learnable --swiglu "
    f"--add-bias-linear {_EXPERTS} --vocab-size 201087"
)
_SPARSE = (
    "--multi-latent-attention --kv-lora-rank 512 --qk-pos-emb-head-dim 64 "
    "--qk-layernorm --swiglu --experimental-attention-variant dsa "
    "--dsa-indexer-head-dim 128 --dsa-indexer-topk 2048 --dsa-indexer-loss-coeff 0.01 "
    "--num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8 "
    f"--moe-shared-expert-intermediate-size 2048 {_EXPERTS} "
    "--expert-model-parallel-size 64"
)
_GLM = (
    f"{_SPARSE} --dsa-indexer-n-heads 32 --q-lora-rank 2048 --qk-head-dim 192 "
    "--v-head-dim 256 --num-layers 78 --hidden-size 6144 --num-attention-heads 64 "
    "--ffn-hidden-size 12288 --moe-layer-freq ([0]*3+[1]*75) --vocab-size 154879"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model.

    Attributes:
        billions: its published number of parameters.
        ranks: of the run that is planned.
        flags: of its script; those of a hybrid have a pattern.
    """

    billions: float
    ranks: int
    flags: str

    @property
    def script(self) -> str:
        """Of Megatron-LM."""
        return (
            "pretrain_hybrid.py"
            if "--hybrid-layer-pattern" in self.flags
            else "pretrain_gpt.py"
        )


SHAPES = {
    "Nemotron-H-8B": Shape(
        8.1,
        64,
        f"{_HYBRID} M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- --hidden-size "
        "4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
        "--ffn-hidden-size 21504 --mamba-num-heads 128",
    ),
    "Nemotron-3-Nano-30B-A3B": Shape(
        31.6,
        64,
        f"{_HYBRID} {_NANO} --hidden-size 2688 --num-attention-heads 32 --kv-channels "
        "128 --group-query-attention --num-query-groups 2 --mamba-num-heads 64 "
        "--num-experts 128 --ffn-hidden-size 1856 --moe-ffn-hidden-size 1856 "
        f"--moe-router-topk 6 --moe-shared-expert-intermediate-size 3712 {_EXPERTS} "
        "--expert-model-parallel-size 8",
    ),
    "Nemotron-3-Super-120B-A12B": Shape(
        120.6,
        256,
        f"{_HYBRID} {_SUPER} --hidden-size 4096 --num-attention-heads 32 --kv-channels "
        "128 --group-query-attention --num-query-groups 2 --mamba-num-heads 128 "
        "--num-experts 512 --ffn-hidden-size 2688 --moe-ffn-hidden-size 2688 "
        "--moe-router-topk 22 --moe-latent-size 1024 "
        f"--moe-shared-expert-intermediate-size 5376 {_EXPERTS} "
        "--expert-model-parallel-size 64",
    ),
    "Qwen3-Next-80B-A3B": Shape(
        80,
        256,
        f"{_DELTA} --num-layers 48 --hidden-size 2048 --num-attention-heads 16 "
        "--num-experts 512 --moe-ffn-hidden-size 512 --moe-router-topk 10 --vocab-size "
        "151935 --moe-shared-expert-intermediate-size 512 --linear-num-value-heads 32 "
        "--expert-model-parallel-size 64",
    ),
    "Qwen3.5-35B-A3B": Shape(
        35,
        64,
        f"{_DELTA} --num-layers 40 --hidden-size 2048 --num-attention-heads 16 "
        "--num-experts 256 --moe-ffn-hidden-size 512 --moe-router-topk 8 --vocab-size "
        "248319 --moe-shared-expert-intermediate-size 512 --linear-num-value-heads 32 "
        "--expert-model-parallel-size 8",
    ),
    "Qwen3.5-397B-A17B": Shape(
        397,
        1024,
        f"{_DELTA} --num-layers 60 --hidden-size 4096 --num-attention-heads 32 "
        "--num-experts 512 --moe-ffn-hidden-size 1024 --moe-router-topk 10 "
        "--vocab-size 248319 --moe-shared-expert-intermediate-size 1024 "
        "--linear-num-value-heads 64 --expert-model-parallel-size 64",
    ),
    "gpt-oss-20b": Shape(
        20.9,
        64,
        f"{_SINKS} --num-layers 24 --num-experts 32 --expert-model-parallel-size 8",
    ),
    "gpt-oss-120b": Shape(
        116.8,
        256,
        f"{_SINKS} --num-layers 36 --num-experts 128 --expert-model-parallel-size 64",
    ),
    "DeepSeek-V3.2": Shape(
        672,
        1024,
        f"{_SPARSE} --dsa-indexer-n-heads 64 --q-lora-rank 1536 --qk-head-dim 128 "
        "--v-head-dim 128 --num-layers 61 --hidden-size 7168 --num-attention-heads 128 "
        "--ffn-hidden-size 18432 --moe-layer-freq ([0]*3+[1]*58) --vocab-size 129279",
    ),
    "GLM-5": Shape(744, 1024, _GLM),
    "GLM-5.2": Shape(
        744, 1024, f"{_GLM} --dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3"
    ),
}
_RUN = (
    "--bf16 --micro-batch-size 1 --global-batch-size 1024 --train-iters 1 --lr 1e-3 "
    "--normalization RMSNorm --tokenizer-type NullTokenizer --seq-length 4096 "
    "--max-position-embeddings 4096 --untie-embeddings-and-output-weights "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--mock-data --make-vocab-size-divisible-by 1 --no-bias-dropout-fusion"
)
HEAD = (
    "| model | ranks | parameters, billions: built / published | Muon's | AdamW, ms | "
    "contiguous "
    "| bucketed | Megatron's duplicated |\n|---|--:|--:|--:|--:|--:|--:|--:|"
)


def planned(name: str, checkout: Path) -> dict[str, Any]:
    """What ``plan --json`` writes."""
    shape = SHAPES[name]
    run = (
        _RUN if "--add-bias-linear" in shape.flags else f"{_RUN} --disable-bias-linear"
    )
    run = run if "none" in shape.flags else f"{run} --position-embedding-type rope"
    flags = f"{shape.flags} {run}".replace("--add-bias-linear ", "")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        line = ["plan", "--json", str(file), "--world-size", str(shape.ranks)]
        command = [sys.executable, "-W", "ignore", "-m", "megatron_muon", *line]
        succeeded(*command, checkout / shape.script, *flags.split())
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def share(plan: dict[str, Any]) -> tuple[int, int]:
    """Parameters of the model, and Muon's."""
    shares = [stage["share"] for stage in plan["stages"]]
    return sum(each["total"] for each in shares), sum(each["muon"] for each in shares)


def _cells(name: str, checkout: Path) -> Iterator[str]:
    plan = planned(name, checkout)
    total, muon = share(plan)
    yield f"{total / 1e9:.1f} / {SHAPES[name].billions:g}"
    yield f"{muon / total:.0%}"
    for row in ("adamw", "contiguous", "bucketed", "duplicated"):
        yield f"{1e3 * plan['step'][row]['seconds']:.1f}"


def main() -> None:
    """Print a row as soon as it is planned."""
    checkout = Path(os.environ["MEGATRON_LM_PATH"])
    print(HEAD)
    for name, shape in SHAPES.items():
        if not sys.argv[1:] or any(word in name for word in sys.argv[1:]):
            cells = " | ".join(_cells(name, checkout))
            print(f"| {name} | {shape.ranks:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
