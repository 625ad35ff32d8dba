"""Llama-3-8B as a stage of one TP rank; run it to print what the plan costs.

python tests/llama.py
"""

from __future__ import annotations

from dataclasses import replace

from megatron_muon.buckets import Buffer, Weight, choose, cost, stock_bucket_size
from megatron_muon.config import MuonConfig
from megatron_muon.layout import Parameter, Span, interleaved_rows, whole_matrix
from megatron_muon.plan import make_plan
from megatron_muon.training.bucketing import REFERENCE_DP_SIZE


def llama_8b(dp_size: int) -> tuple[list[Parameter], int]:
    """Muon's parameters, and the size of their one bucket (reverse order, starts padded)."""
    h, ffn, kv, vocab = 4096, 14336, 1024, 128256
    shapes: list[tuple[str, tuple[int, int]]] = [("embedding", (vocab, h))]
    for layer in range(32):
        for name, shape in {
            "linear_proj": (h, h),
            "norm1": (h, 1),
            "linear_qkv": (h + 2 * kv, h),
            "norm2": (h, 1),
            "linear_fc1": (2 * ffn, h),
            "linear_fc2": (h, ffn),
        }.items():
            shapes.append((f"{layer}.{name}", shape))
    shapes += [("norm", (h, 1)), ("output_layer", (vocab, h))]
    parameters, position = [], 0
    for name, (rows, cols) in reversed(shapes):
        position += -position % 64
        span = Span(position, position + rows * cols)
        position = span.stop
        if "linear" in name:
            if "qkv" in name:
                parts = (("q", 512), ("k", 128), ("v", 128))
                matrices, blocks = interleaved_rows(name, (rows, cols), 1, parts)
            else:
                matrices, blocks = whole_matrix(name, (rows, cols), 0, 1)
            parameters.append(Parameter(name, (rows, cols), 0, span, span, 0, matrices, blocks))
    numel = position + -position % (128 * dp_size)
    return [replace(p, bucket=Span(0, numel)) for p in parameters], numel


def main() -> None:
    """Bytes that Muon adds to AdamW's reduce-scatter and all-gather, and the busiest rank."""
    print("homes       DP   bytes over AdamW's, mean   busiest rank over mean")
    for homes in ("balanced", "local"):
        for dp_size in (8, 64, 512):
            parameters, numel = llama_8b(dp_size)
            plan = make_plan(parameters, ((tuple(range(dp_size)),),), MuonConfig(homes=homes))
            adamw_bytes = numel * (4 + 2) * (dp_size - 1) / dp_size
            share = sum(plan.sent_bytes()) / dp_size / adamw_bytes
            flops = plan.ns_flops()
            busiest = max(flops) * dp_size / sum(flops)
            print(f"{homes:8} {dp_size:5} {share:26.2%} {busiest:24.2f}")
    print("\n--overlap-grad-reduce, local homes: buckets, bytes over AdamW's, by --muon-dp-layout")
    print("(ordered: contiguous on megatron-core 0.18 and later)")
    print("   DP   contiguous      stock     ordered")
    for dp_size in (8, 64, 512):
        here, numel = whole_buffer(dp_size)
        chosen = choose([whole_buffer(REFERENCE_DP_SIZE)[0]])
        assert chosen is not None
        size = numel // chosen.number
        found = [cost([here], size), cost([here], stock_bucket_size(dp_size))]
        found.append(cost([here], size, ordered=True))
        adamw_bytes = numel * (4 + 2) * (dp_size - 1) / dp_size
        cells = [f"{one.buckets:5} {one.exchanged / adamw_bytes:7.2%}" for one in found]
        print(f"{dp_size:5} {' '.join(cells)}")


def whole_buffer(dp_size: int) -> tuple[Buffer, int]:
    """All weights but norms in Megatron's order, and their elements."""
    vocab, h = 128256, 4096
    muons = [rows * cols for rows, cols in (p.shape for p in reversed(llama_8b(dp_size)[0]))]
    ends = Weight(vocab * h, False)
    buffer = Buffer((ends, *(Weight(numel, True) for numel in muons), ends), dp_size)
    return buffer, sum(weight.numel for weight in buffer.weights)


if __name__ == "__main__":
    main()
