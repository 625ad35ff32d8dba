"""Llama-3-8B as a stage of one TP rank; run it to print what the plan costs.

cd tests && python -m figures.llama
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.buckets import (
    Weight,
    choose,
    in_buckets,
    stock_bucket_size,
)
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import UNPLACED, Parameter
from megatron_muon.planning.plan import ExchangePlan, make_plan
from megatron_muon.planning.sections import sectioned, whole_matrix
from megatron_muon.settings.config import MuonConfig
from support.buckets import placed
from support.sections import repeated

HIDDEN, FFN, KV, VOCABULARY, LAYERS = 4096, 14336, 1024, 128256, 32
WHOLE = 1 << 60  # elements: one bucket


def _weights() -> list[tuple[str, tuple[int, int]]]:
    """Name and shape, in Megatron's order."""
    weights = [("embedding", (VOCABULARY, HIDDEN))]
    for layer in range(LAYERS):
        for name, shape in {
            "linear_proj": (HIDDEN, HIDDEN),
            "norm1": (HIDDEN, 1),
            "linear_qkv": (HIDDEN + 2 * KV, HIDDEN),
            "norm2": (HIDDEN, 1),
            "linear_fc1": (2 * FFN, HIDDEN),
            "linear_fc2": (HIDDEN, FFN),
        }.items():
            weights.append((f"{layer}.{name}", shape))
    return [*weights, ("norm", (HIDDEN, 1)), ("output_layer", (VOCABULARY, HIDDEN))]


def _muon(name: str, shape: tuple[int, int]) -> Parameter | None:
    """Its parameter of Muon's, without a place; None for AdamW's."""
    if "linear" not in name:
        return None
    if "qkv" in name:
        parts = (("q", 512), ("k", 128), ("v", 128))
        matrices, blocks = sectioned(
            name, shape, 0, 1, repeated(shape[0] // 768, parts)
        )
    else:
        matrices, blocks = whole_matrix(name, shape, 0, 1)
    return Parameter(name, shape, 0, UNPLACED, UNPLACED, 0, matrices, blocks)


def whole_buffer() -> list[Weight]:
    """Its one grad buffer."""
    return [Weight(rows * cols, "linear" in name) for name, (rows, cols) in _weights()]


def llama_8b(dp_size: int, bucket_size: int = WHOLE) -> tuple[list[Parameter], int]:
    """Muon's parameters, and the elements of the buffer."""
    buckets = list(in_buckets(whole_buffer(), bucket_size, dp_size))
    muons = [_muon(*weight) for weight in _weights()]
    return placed(muons, buckets), sum(bucket.numel for bucket in buckets)


def llama_plan(
    dp_size: int, config: MuonConfig, bucket_size: int = WHOLE
) -> tuple[ExchangePlan, float]:
    """Its plan, and what it adds to the bytes of AdamW's reduce-scatter (fp32) and
    all-gather (bf16), on an average rank.
    """
    parameters, numel = llama_8b(dp_size, bucket_size)
    plan = make_plan(
        parameters, RankGrid(((tuple(range(dp_size)),),)), Numerics(config)
    )
    adamw_bytes = numel * (4 + 2) * (dp_size - 1) / dp_size
    return plan, sum(plan.sent_bytes()) / dp_size / adamw_bytes


def contiguous_bucket_size() -> int:
    """Elements of a bucket in the fewest that keep the overlap."""
    buffer = whole_buffer()
    chosen = choose([buffer])
    assert chosen is not None
    return sum(weight.numel for weight in buffer) // chosen.number


def _cells(sizes: Sequence[int], bucket_size: int | None) -> str:
    cells = []
    for dp_size in sizes:
        size = stock_bucket_size(dp_size) if bucket_size is None else bucket_size
        plan, share = llama_plan(dp_size, MuonConfig(), size)
        buckets = sum(1 for _ in in_buckets(whole_buffer(), size, dp_size))
        flops = plan.ns_flops()
        busiest = max(flops) * dp_size / sum(flops)
        cells.append(f"{buckets:4} {share:7.2%} {busiest:5.2f}")
    return "   ".join(cells)


def main() -> None:
    """Bytes that Muon adds to AdamW's, and the busiest rank."""
    sizes = (8, 64, 512)
    print("buckets, bytes over AdamW's on an average rank, Newton-Schulz of")
    print("the busiest rank over the mean")
    print(f"{'':15}" + "   ".join(f"{f'DP {size}':>18}" for size in sizes))
    few = contiguous_bucket_size()
    for title, bucket_size in (
        ("one bucket", WHOLE),
        ("overlap", few),
        ("stock buckets", None),
    ):
        print(f"{title:15}{_cells(sizes, bucket_size)}")


if __name__ == "__main__":
    main()
