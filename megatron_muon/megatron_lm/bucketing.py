"""``--muon-dp-layout``: the number of Megatron's buckets where it overlaps gradient reduction.

Without the overlap, and on later pipeline stages, a buffer is one bucket, so shards are contiguous.
With it Megatron's buckets have about 40 M elements, whose shards cut nearly every parameter of a
large model. The contiguous layout takes the fewest buckets that keep the overlap.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_muon.megatron_lm.flags.settings import muon_config
from megatron_muon.megatron_lm.flags.values import value_given
from megatron_muon.planning.buckets.count import (
    Buffer,
    LocalParameter,
    choose,
    cost,
    exchanged,
    stock_bucket_size,
)
from megatron_muon.planning.buckets.order import UNPLACED
from megatron_muon.planning.layout import Parameter, whole_matrix
from megatron_muon.planning.sections import repeated, sectioned

# The number of buckets must not depend on the number of ranks. A run may start from an AdamW
# checkpoint in dp_reshardable, which loads at another DP size, but not into other buckets. A small
# size is taken since the exchange costs most with few ranks.
REFERENCE_DP_SIZE = 8


def choose_buckets(args: Namespace) -> list[str]:
    """Set ``ddp_num_buckets`` where the layout is contiguous and gradient reduction overlaps.

    Flags for the number or size of buckets have precedence.

    Args:
        args: Megatron's arguments, validated.

    Returns:
        A line to print with the choice and its reason; empty where there is no choice.
    """
    if args.muon_dp_layout != "contiguous" or not args.overlap_grad_reduce:
        return []
    for option, given in (
        ("--ddp-num-buckets", args.ddp_num_buckets),
        ("--ddp-bucket-size", args.ddp_bucket_size),
    ):
        if given is not None:
            return [f"--muon-dp-layout contiguous: buckets as {option} {given} has them"]
    if getattr(args, "overlap_param_gather_with_optimizer_step", False):
        return []  # Megatron makes one bucket of each buffer then
    if any(getattr(args, f"hybrid_{name}_pattern", None) for name in ("override", "layer")):
        return [
            "--muon-dp-layout contiguous: Megatron's own buckets, since what the layers of a "
            "hybrid model have is not known here; --ddp-num-buckets sets their number"
        ]
    here = buffers(args, REFERENCE_DP_SIZE, REFERENCE_DP_SIZE)
    chosen = choose(here)
    if chosen is None and cost(here, stock_bucket_size(REFERENCE_DP_SIZE)).buckets <= len(here):
        return [
            "--muon-dp-layout contiguous: Megatron's own buckets, one a buffer on the first "
            "pipeline stage: so small a model has nothing left to overlap"
        ]
    if chosen is None:
        return [
            "--muon-dp-layout contiguous: Megatron's own buckets, of about 40 M elements: fewer "
            "that keep the overlap would not send less on the first pipeline stage"
        ]
    # Megatron divides the elements of all model chunks by it, and cuts only the first chunk.
    args.ddp_num_buckets = chosen.number * (args.virtual_pipeline_model_parallel_size or 1)
    return [_reason(args, chosen.number)]


def aligns_shards(args: Namespace) -> bool:
    """Whether a run orders the parameters within buckets so that shards cut few of them.

    It does not where it may load an AdamW checkpoint, since most formats keep Megatron's order.
    """
    from megatron_muon.mcore.wiring.buffers.bucket_layout import takes_layouts

    contiguous = (value_given(args, "muon_dp_layout") or "contiguous") == "contiguous"
    from_adamw = value_given(args, "muon_from_adamw") not in (None, "refuse")
    return contiguous and not from_adamw and takes_layouts()


def _reason(args: Namespace, number: int) -> str:
    dp_size, expert_dp_size = _dp_sizes(args)
    here, config = buffers(args, dp_size, expert_dp_size), muon_config(args)
    total = sum(weight.numel for buffer in here for weight in buffer.weights)
    ordered, stock_size = aligns_shards(args), stock_bucket_size(dp_size)
    ours, stock = cost(here, total // number), cost(here, stock_size)
    sent = exchanged(here, total // number, config, ordered=ordered)
    stock_sent = exchanged(here, stock_size, config)
    how = ", in an order in which shards cut few weights where that sends less" if ordered else ""
    return (
        f"--muon-dp-layout contiguous: about {ours.buckets} buckets in place of {stock.buckets} on "
        f"the first pipeline stage, the fewest that keep the overlap{how}: with {config.homes} "
        f"homes the mean rank sends about {_gb(sent)} a step for Muon in place of "
        f"{_gb(stock_sent)} (an estimate for whole matrices; the stages' own lines count it), and "
        f"{_gb(ours.waited)} in place of {_gb(stock.waited)} of Megatron's own with no backward "
        "pass left to hide it. --ddp-num-buckets or --ddp-bucket-size sets another number, "
        "--muon-dp-layout bucketed leaves it to Megatron"
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def _dp_sizes(args: Namespace) -> tuple[int, int]:
    """Number of shards of a buffer: of dense parameters, and of experts' parameters."""
    stage = args.world_size // args.pipeline_model_parallel_size
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    instances = args.num_distributed_optimizer_instances
    dense = stage // args.tensor_model_parallel_size // instances
    return dense, max(1, stage // (expert_tp * args.expert_model_parallel_size) // instances)


def buffers(args: Namespace, dp_size: int, expert_dp_size: int) -> list[Buffer]:
    """A rank's grad buffers of the first model chunk on the first pipeline stage, approximately.

    Norms, biases, routers and the layers of multi-token prediction are left out. The buffers only
    serve to choose the number of buckets and to print the reason.

    Args:
        args: Megatron's arguments, validated.
        dp_size, expert_dp_size: number of shards of the dense buffer and of the experts' buffer.
    """
    tp = args.tensor_model_parallel_size
    expert_tp = args.expert_tensor_parallel_size or tp
    vocabulary = getattr(args, "padded_vocab_size", None) or args.vocab_size or 0
    embedding = LocalParameter(vocabulary * args.hidden_size // tp)
    dense, experts = [embedding], []
    for number in range(_layers(args)):
        of_layer, of_experts = _feed_forward(args, number)
        dense += [weight.of(tp) for weight in (*_attention(args), *of_layer)]
        experts += [weight.of(expert_tp) for weight in of_experts]
    if args.pipeline_model_parallel_size == 1 and args.untie_embeddings_and_output_weights:
        dense.append(embedding)
    both = [Buffer(tuple(dense), dp_size, tp), Buffer(tuple(experts), expert_dp_size, expert_tp)]
    return [buffer for buffer in both if buffer.weights]


@dataclass(frozen=True, slots=True)
class _Whole:
    """A weight over all TP ranks.

    Attributes:
        rows, cols: shape of the whole weight.
        partition_dim: dimension that TP splits; None where TP ranks hold replicas.
        parts: (name, rows) of Q, K and V in one query group of a fused QKV weight; else empty.
    """

    rows: int
    cols: int
    partition_dim: int | None
    parts: tuple[tuple[str, int], ...] = ()

    def of(self, tp_size: int) -> LocalParameter:
        """The part of the weight on one of ``tp_size`` TP ranks."""
        rows = self.rows // tp_size if self.partition_dim == 0 else self.rows
        cols = self.cols // tp_size if self.partition_dim == 1 else self.cols
        shape, dim = (rows, cols), self.partition_dim
        groups, rest = divmod(self.rows, sum(count for _, count in self.parts) or 1)
        if self.parts and rest == 0:
            sections = repeated(groups, self.parts)
            matrices, blocks = sectioned("", shape, 0, tp_size, sections)
        else:
            matrices, blocks = whole_matrix("", shape, dim, tp_size)
        muon = Parameter("", shape, dim, UNPLACED, UNPLACED, 0, matrices, blocks)
        return LocalParameter(rows * cols, muon)


def _layers(args: Namespace) -> int:
    first = getattr(args, "decoder_first_pipeline_num_layers", None)
    stages = args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    return max(1, int(first or args.num_layers // stages) // chunks)


def _attention(args: Namespace) -> Iterator[_Whole]:
    """The attention weights of a layer, in Megatron's order.

    Multi-latent attention's down projections count as replicated, as in Transformer Engine.
    """
    hidden, heads = args.hidden_size, args.num_attention_heads
    if args.multi_latent_attention:
        query, rope = args.qk_head_dim + args.qk_pos_emb_head_dim, args.qk_pos_emb_head_dim
        yield _Whole(hidden, heads * args.v_head_dim, 1)
        if args.q_lora_rank:
            yield _Whole(args.q_lora_rank, hidden, None)
        yield _Whole(heads * query, args.q_lora_rank or hidden, 0)
        yield _Whole(args.kv_lora_rank + rope, hidden, None)
        yield _Whole(heads * (args.qk_head_dim + args.v_head_dim), args.kv_lora_rank, 0)
        return
    groups, size = args.num_query_groups if args.group_query_attention else heads, args.kv_channels
    yield _Whole(hidden, heads * size, 1)
    parts = (("q", heads // groups * size), ("k", size), ("v", size))
    whole = getattr(args, "muon_split_qkv", None) is False
    yield _Whole((heads + 2 * groups) * size, hidden, 0, () if whole else parts)


def _feed_forward(args: Namespace, layer: int) -> tuple[list[_Whole], list[_Whole]]:
    """The dense MLP weights of a layer, and the weights of a rank's experts."""
    if not args.num_experts or not _has_experts(args.moe_layer_freq, layer):
        return list(_two(args, args.ffn_hidden_size)), []
    shared = list(_two(args, args.moe_shared_expert_intermediate_size or 0))
    one = list(_two(args, args.moe_ffn_hidden_size or args.ffn_hidden_size))
    count = args.num_experts // args.expert_model_parallel_size
    if args.moe_grouped_gemm:  # Megatron orders these weights by kind, not by expert
        return shared, [weight for weight in one for _ in range(count)]
    return shared, one * count


def _has_experts(frequency: int | list[int], layer: int) -> bool:
    if isinstance(frequency, int):
        return layer % frequency == 0
    return bool(frequency[layer % len(frequency)])


def _two(args: Namespace, ffn: int) -> Iterator[_Whole]:
    if ffn:
        gated = args.swiglu or getattr(args, "quick_geglu", False)
        yield _Whole(ffn * (2 if gated else 1), args.hidden_size, 0)
        yield _Whole(args.hidden_size, ffn, 1)
