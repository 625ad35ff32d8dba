"""Llama-3-8B as a stage of one TP rank; run it to print what the plan costs.

cd tests && python -m figures.llama
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.buckets.count import (
    REFERENCE_DP_SIZE,
    Buffer,
    LocalParameter,
    choose,
    in_buckets,
    stock_bucket_size,
)
from megatron_muon.planning.buckets.order import Holders, orders, parameters_in
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import UNPLACED, Parameter, whole_matrix
from megatron_muon.planning.plan import ExchangePlan, make_plan
from megatron_muon.planning.sections import sectioned
from megatron_muon.settings.config import MuonConfig
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


def _weight(name: str, shape: tuple[int, int]) -> LocalParameter:
    if "linear" not in name:
        return LocalParameter(shape[0] * shape[1])
    if "qkv" in name:
        parts = (("q", 512), ("k", 128), ("v", 128))
        matrices, blocks = sectioned(
            name, shape, 0, 1, repeated(shape[0] // 768, parts)
        )
    else:
        matrices, blocks = whole_matrix(name, shape, 0, 1)
    muon = Parameter(name, shape, 0, UNPLACED, UNPLACED, 0, matrices, blocks)
    return LocalParameter(shape[0] * shape[1], muon)


def whole_buffer(dp_size: int) -> Buffer:
    """Its one grad buffer."""
    return Buffer(tuple(_weight(*weight) for weight in _weights()), Holders(dp_size))


def llama_8b(
    dp_size: int, bucket_size: int = WHOLE, ordered_for: MuonConfig | None = None
) -> tuple[list[Parameter], int]:
    """Muon's parameters, and the elements of the buffer.

    In Megatron's order, or ordered for these settings.
    """
    buckets = list(in_buckets(whole_buffer(dp_size), bucket_size))
    own = [bucket.stock_order() for bucket in buckets]
    chosen = (
        own
        if ordered_for is None
        else orders(buckets, Holders(dp_size), Numerics(ordered_for))
    )
    return parameters_in(buckets, chosen), sum(bucket.numel for bucket in buckets)


def llama_plan(
    dp_size: int, config: MuonConfig, bucket_size: int = WHOLE, *, ordered: bool = False
) -> tuple[ExchangePlan, float]:
    """Its plan, and what it adds to the bytes of AdamW's reduce-scatter (fp32) and
    all-gather (bf16), on an average rank.
    """
    parameters, numel = llama_8b(dp_size, bucket_size, config if ordered else None)
    plan = make_plan(
        parameters, RankGrid(((tuple(range(dp_size)),),)), Numerics(config)
    )
    adamw_bytes = numel * (4 + 2) * (dp_size - 1) / dp_size
    return plan, sum(plan.sent_bytes()) / dp_size / adamw_bytes


def contiguous_bucket_size() -> int:
    """Elements of a bucket in the fewest that keep the overlap."""
    buffer = whole_buffer(REFERENCE_DP_SIZE)
    chosen = choose([buffer])
    assert chosen is not None
    return sum(weight.numel for weight in buffer.weights) // chosen.number


def _cells(
    sizes: Sequence[int], config: MuonConfig, bucket_size: int | None, ordered: bool
) -> str:
    cells = []
    for dp_size in sizes:
        size = stock_bucket_size(dp_size) if bucket_size is None else bucket_size
        plan, share = llama_plan(dp_size, config, size, ordered=ordered)
        buckets = sum(1 for _ in in_buckets(whole_buffer(dp_size), size))
        flops = plan.ns_flops()
        busiest = max(flops) * dp_size / sum(flops)
        cells.append(f"{buckets:4} {share:7.2%} {busiest:5.2f}")
    return "   ".join(cells)


def main() -> None:
    """Bytes that Muon adds to AdamW's, and the busiest rank."""
    sizes = (8, 64, 512)
    print("buckets, bytes over AdamW's on an average rank, Newton-Schulz of")
    print(
        "the busiest rank over the mean; ordered: contiguous on megatron-core 0.18 and "
        "later"
    )
    print(f"{'':33}" + "   ".join(f"{f'DP {size}':>18}" for size in sizes))
    few = contiguous_bucket_size()
    for title, bucket_size in (
        ("one bucket", WHOLE),
        ("overlap", few),
        ("stock buckets", None),
    ):
        for homes in ("balanced", "local"):
            for ordered in (False, True) if bucket_size else (False,):
                config = MuonConfig(homes=homes)
                name = f"{title}, {homes}{', ordered' * ordered}"
                print(f"{name:33}{_cells(sizes, config, bucket_size, ordered)}")


if __name__ == "__main__":
    main()
