"""``--muon-dp-layout``: the number of Megatron's buckets where it overlaps gradient reduction.

Without the overlap, and on later pipeline stages, a buffer is one bucket, so shards are contiguous.
With it Megatron's buckets have about 40 M elements, whose shards cut nearly every parameter of a
large model. The contiguous layout takes the fewest buckets that keep the overlap.
"""

from __future__ import annotations

from argparse import Namespace

from megatron_muon.planning.buckets.count import Buffer, LocalParameter, choose
from megatron_muon.planning.buckets.order import UNPLACED
from megatron_muon.planning.layout import Parameter, whole_matrix
from megatron_muon.settings.flag_values import value_given

# The number of buckets must not depend on the number of ranks. A run may start from an AdamW
# checkpoint in dp_reshardable, which loads at another DP size, but not into other buckets. A small
# size is taken since the exchange costs most with few ranks.
REFERENCE_DP_SIZE = 8


def choose_buckets(args: Namespace) -> list[str]:
    """Set ``ddp_num_buckets`` where the layout is contiguous and gradient reduction overlaps.

    Flags for the number or size of buckets have precedence.

    Returns:
        A line to print with the choice and its reason; empty where there is no choice.
    """
    if args.muon_dp_layout != "contiguous" or not args.overlap_grad_reduce:
        return []
    are_given = args.ddp_num_buckets is not None or args.ddp_bucket_size is not None
    if are_given or getattr(args, "overlap_param_gather_with_optimizer_step", False):
        return []  # with the latter Megatron makes one bucket of each buffer
    if any(getattr(args, f"hybrid_{name}_pattern", None) for name in ("override", "layer")):
        return [
            "--muon-dp-layout contiguous: Megatron's own buckets, since the sizes of a hybrid "
            "model's layers are unknown here; --ddp-num-buckets sets their number"
        ]
    chosen = choose(buffers(args, REFERENCE_DP_SIZE))
    if chosen is None:
        return [
            "--muon-dp-layout contiguous: Megatron's own buckets, of about 40 M elements: fewer "
            "that keep the overlap would not send less on the first pipeline stage"
        ]
    # Megatron divides the elements of all model chunks by it, and cuts only the first chunk.
    args.ddp_num_buckets = chosen.number * (args.virtual_pipeline_model_parallel_size or 1)
    ordered = ", in an order in which shards cut few weights where that sends less"
    return [
        f"--muon-dp-layout contiguous: about {chosen.cost.buckets} buckets in place of "
        f"{chosen.stock.buckets} on the first pipeline stage, the fewest that keep the overlap"
        f"{ordered if aligns_shards(args) else ''}. --ddp-num-buckets sets another number"
    ]


def aligns_shards(args: Namespace) -> bool:
    """Whether a run orders the parameters within buckets so that shards cut few of them.

    It does not where it may load an AdamW checkpoint, since most formats keep Megatron's order.
    """
    from megatron_muon.mcore.wiring.buffers.bucket_layout import takes_layouts

    contiguous = (value_given(args, "muon_dp_layout") or "contiguous") == "contiguous"
    from_adamw = value_given(args, "muon_from_adamw") not in (None, "refuse")
    return contiguous and not from_adamw and takes_layouts()


def buffers(args: Namespace, dp_size: int) -> list[Buffer]:
    """A rank's grad buffers of the first model chunk on the first pipeline stage, approximately.

    Norms, biases, routers and the layers of multi-token prediction are left out. The buffers only
    serve to choose the number of buckets.
    """
    tp = args.tensor_model_parallel_size
    expert_tp = args.expert_tensor_parallel_size or tp
    vocabulary = getattr(args, "padded_vocab_size", None) or args.vocab_size or 0
    embedding = LocalParameter(vocabulary * args.hidden_size // tp)
    dense, experts = [embedding], []
    for number in range(_layers(args)):
        of_layer, of_experts = _feed_forward(args, number, tp, expert_tp)
        dense += [_muons(numel) for numel in (*_attention(args, tp), *of_layer)]
        experts += [_muons(numel) for numel in of_experts]
    if args.pipeline_model_parallel_size == 1 and args.untie_embeddings_and_output_weights:
        dense.append(embedding)
    both = [Buffer(tuple(dense), dp_size, tp), Buffer(tuple(experts), dp_size, expert_tp)]
    return [buffer for buffer in both if buffer.weights]


def _muons(numel: int) -> LocalParameter:
    """A weight of Muon's; its shape does not matter here."""
    matrices, blocks = whole_matrix("", (1, numel), 0, 1)
    muon = Parameter("", (1, numel), 0, UNPLACED, UNPLACED, 0, matrices, blocks)
    return LocalParameter(numel, muon)


def _layers(args: Namespace) -> int:
    first = getattr(args, "decoder_first_pipeline_num_layers", None)
    stages = args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    return max(1, int(first or args.num_layers // stages) // chunks)


def _attention(args: Namespace, tp: int) -> list[int]:
    """Elements of the attention weights of a layer on a rank, in Megatron's order.

    Multi-latent attention's down projections count as replicated, as in Transformer Engine.
    """
    hidden, heads = args.hidden_size, args.num_attention_heads
    if args.multi_latent_attention:
        query, rope = args.qk_head_dim + args.qk_pos_emb_head_dim, args.qk_pos_emb_head_dim
        down = [args.q_lora_rank * hidden] if args.q_lora_rank else []
        return [
            hidden * heads * args.v_head_dim // tp,
            *down,
            heads * query * (args.q_lora_rank or hidden) // tp,
            (args.kv_lora_rank + rope) * hidden,
            heads * (args.qk_head_dim + args.v_head_dim) * args.kv_lora_rank // tp,
        ]
    groups = args.num_query_groups if args.group_query_attention else heads
    query, both = heads * args.kv_channels, 2 * groups * args.kv_channels
    return [hidden * query // tp, (query + both) * hidden // tp]


def _feed_forward(
    args: Namespace, layer: int, tp: int, expert_tp: int
) -> tuple[list[int], list[int]]:
    """Elements on a rank of the dense MLP weights of a layer, and of the experts' weights."""
    if not args.num_experts or not _has_experts(args.moe_layer_freq, layer):
        return _two(args, args.ffn_hidden_size, tp), []
    shared = _two(args, args.moe_shared_expert_intermediate_size or 0, tp)
    one = _two(args, args.moe_ffn_hidden_size or args.ffn_hidden_size, expert_tp)
    count = args.num_experts // args.expert_model_parallel_size
    if args.moe_grouped_gemm:  # Megatron orders these weights by kind, not by expert
        return shared, [numel for numel in one for _ in range(count)]
    return shared, one * count


def _has_experts(frequency: int | list[int], layer: int) -> bool:
    if isinstance(frequency, int):
        return layer % frequency == 0
    return bool(frequency[layer % len(frequency)])


def _two(args: Namespace, ffn: int, tp: int) -> list[int]:
    gated = args.swiglu or getattr(args, "quick_geglu", False)
    elements = ffn * args.hidden_size
    return [(2 if gated else 1) * elements // tp, elements // tp] if ffn else []
