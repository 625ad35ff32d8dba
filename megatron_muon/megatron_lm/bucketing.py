"""``--muon-dp-layout``: the number of Megatron's buckets where it overlaps gradient
reduction.

Without the overlap, and on later pipeline stages, a buffer is one bucket, so shards are
contiguous. With it Megatron's buckets have about 40 M elements, whose shards cut nearly
every parameter of a large model. The contiguous layout takes the fewest buckets that
keep the overlap.
"""

from __future__ import annotations

from argparse import Namespace

from megatron_muon.planning.buckets.count import Buffer, LocalParameter, choose
from megatron_muon.planning.buckets.order import UNPLACED
from megatron_muon.planning.layout import Parameter
from megatron_muon.planning.sections import Rows, Sections, repeated, sectioned
from megatron_muon.settings.flags import written

# The number of buckets must not depend on the number of ranks. A run may start from an
# AdamW checkpoint in dp_reshardable, which loads at another DP size, but not into other
# buckets. A small size is taken since the exchange costs most with few ranks.
REFERENCE_DP_SIZE = 8


def choose_buckets(args: Namespace) -> list[str]:
    """Set ``ddp_num_buckets`` where the layout is contiguous and gradient reduction
    overlaps.

    Flags for the number or size of buckets have precedence.

    Returns:
        A line to print with the choice and its reason; empty where there is no choice.
    """
    if args.muon_dp_layout != "contiguous" or not args.overlap_grad_reduce:
        return []
    are_given = args.ddp_num_buckets is not None or args.ddp_bucket_size is not None
    if are_given or getattr(args, "overlap_param_gather_with_optimizer_step", False):
        return []  # with the latter Megatron makes one bucket of each buffer
    if any(
        getattr(args, f"hybrid_{name}_pattern", None) for name in ("override", "layer")
    ):
        return [
            "--muon-dp-layout contiguous: Megatron's own buckets, since the sizes of a "
            "hybrid model's layers are unknown here; --ddp-num-buckets sets their "
            "number"
        ]
    chosen = choose(buffers(args, REFERENCE_DP_SIZE))
    if chosen is None:
        return [
            "--muon-dp-layout contiguous: Megatron's own buckets, of about 40 M "
            "elements: fewer that keep the overlap would not send less on the first "
            "pipeline stage"
        ]
    # Megatron divides the elements of all model chunks by it, and cuts only the first
    # chunk.
    args.ddp_num_buckets = chosen.number * (
        args.virtual_pipeline_model_parallel_size or 1
    )
    ordered = ", in an order in which shards cut few weights where that sends less"
    return [
        f"--muon-dp-layout contiguous: about {chosen.cost.buckets} buckets in place of "
        f"{chosen.stock.buckets} on the first pipeline stage, the fewest that keep the "
        "overlap"
        f"{ordered if aligns_shards(args) else ''}. --ddp-num-buckets sets another "
        "number"
    ]


def aligns_shards(args: Namespace) -> bool:
    """Whether a run orders the parameters within buckets so that shards cut few of
    them.

    It does not where it may load an AdamW checkpoint, since most formats keep
    Megatron's order.
    """
    from megatron_muon.mcore.wiring.buffers.bucket_layout import takes_layouts

    contiguous = (written(args, "muon_dp_layout") or "contiguous") == "contiguous"
    from_adamw = written(args, "muon_from_adamw") not in (None, "refuse")
    return contiguous and not from_adamw and takes_layouts()


def vocabulary_of(args: Namespace) -> int:
    """The padded vocabulary; 0 where no flag says it, until Megatron has made the
    tokenizer.
    """
    return getattr(args, "padded_vocab_size", None) or args.vocab_size or 0


def buffers(args: Namespace, dp_size: int, *, norms: bool = False) -> list[Buffer]:
    """A rank's grad buffers of the first model chunk on the first pipeline stage,
    approximately.

    Norms, routers, biases, positions and the layers of multi-token prediction are left
    out, all but the last not with ``norms``; biases of experts always, and a router,
    which has none, gets one. The buffers only serve to choose the number of buckets,
    and with ``norms`` the layout, for which a few elements decide whether a shard's
    edge cuts a parameter. Names of experts' weights have ``.experts.``.
    """
    tp = args.tensor_model_parallel_size
    expert_tp = args.expert_tensor_parallel_size or tp
    embedding = LocalParameter(vocabulary_of(args) * args.hidden_size // tp)
    dense, experts = [embedding], []
    norm = [LocalParameter(args.hidden_size)] * (
        norms and 1 + (args.normalization == "LayerNorm")
    )
    of_heads = [LocalParameter(args.kv_channels)] * (2 * (norms and args.qk_layernorm))
    if norms and args.position_embedding_type == "learned_absolute":
        dense += [LocalParameter(args.max_position_embeddings * args.hidden_size)]
    stages, chunks = (
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
    )
    layers = (
        getattr(args, "decoder_first_pipeline_num_layers", None)
        or args.num_layers // stages
    )
    for number in range(max(1, int(layers) // (chunks or 1))):
        layer = f"decoder.layers.{number}."
        of_layer, of_experts = _feed_forward(args, number)
        if norms and of_experts:
            of_layer = [
                _whole("mlp.router", args.num_experts, args.hidden_size, None),
                *of_layer,
            ]
        for weights in (_attention(args), of_layer):
            dense += norm
            for weight in weights:
                dense += _muons(
                    layer, weight, tp, has_bias=norms and args.add_bias_linear
                )
            dense += of_heads * (weights is not of_layer)
        for weight in of_experts:
            experts += _muons(layer, weight, expert_tp)
    dense += norm * (args.pipeline_model_parallel_size == 1)
    if (
        args.pipeline_model_parallel_size == 1
        and args.untie_embeddings_and_output_weights
    ):
        dense.append(embedding)
    both = [
        Buffer(tuple(dense), dp_size, tp),
        Buffer(tuple(experts), dp_size, expert_tp),
    ]
    return [buffer for buffer in both if buffer.weights]


# A name within its layer, a whole weight's rows, its columns, the dim TP cuts
_Weight = tuple[str, Sections, int, int | None]


def _muons(
    layer: str, weight: _Weight, tp: int, *, has_bias: bool = False
) -> list[LocalParameter]:
    """A weight as a rank has it, and its bias, which TP cuts where it cuts rows."""
    name, sections, cols, dim = weight
    rows = sum(run.count for section in sections for run in section)
    shape = rows // (tp if dim == 0 else 1), cols // (tp if dim == 1 else 1)
    matrices, blocks = sectioned(layer + name, shape, dim, tp, sections)
    muon = Parameter(layer + name, shape, dim, UNPLACED, UNPLACED, 0, matrices, blocks)
    return [
        LocalParameter(shape[0] * shape[1], muon),
        *[LocalParameter(shape[0])] * has_bias,
    ]


def _whole(name: str, rows: int, cols: int, dim: int | None) -> _Weight:
    return name, ((Rows("", rows),),), cols, dim


def _attention(args: Namespace) -> list[_Weight]:
    """The attention weights of a layer, in Megatron's order.

    Multi-latent attention's down projections count as replicated, as in Transformer
    Engine.
    """
    hidden, heads = args.hidden_size, args.num_attention_heads
    of = "self_attention.linear_"
    if args.multi_latent_attention:
        query, rope = (
            args.qk_head_dim + args.qk_pos_emb_head_dim,
            args.qk_pos_emb_head_dim,
        )
        rank, kv_rank, values = args.q_lora_rank, args.kv_lora_rank, args.v_head_dim
        down = [_whole(f"{of}q_down_proj", rank, hidden, None)] if rank else []
        return [
            _whole(f"{of}proj", hidden, heads * values, 1),
            *down,
            _whole(
                f"{of}q_up_proj" if rank else f"{of}q_proj",
                heads * query,
                rank or hidden,
                0,
            ),
            _whole(f"{of}kv_down_proj", kv_rank + rope, hidden, None),
            _whole(f"{of}kv_up_proj", heads * (args.qk_head_dim + values), kv_rank, 0),
        ]
    groups, width = (
        args.num_query_groups if args.group_query_attention else heads,
        args.kv_channels,
    )
    of_group = ("q", heads // groups * width), ("k", width), ("v", width)
    return [
        _whole(f"{of}proj", hidden, heads * width, 1),
        (f"{of}qkv", repeated(groups, of_group), hidden, 0),
    ]


def _feed_forward(args: Namespace, layer: int) -> tuple[list[_Weight], list[_Weight]]:
    """The dense MLP weights of a layer, and a rank's experts' weights."""
    # a period, or a mark for each layer
    every = args.moe_layer_freq if args.num_experts else [0]
    if layer % every if isinstance(every, int) else not every[layer % len(every)]:
        return _two(args, "mlp", args.ffn_hidden_size), []
    shared = _two(
        args, "mlp.shared_experts", args.moe_shared_expert_intermediate_size or 0
    )
    one = _two(args, "mlp.experts", args.moe_ffn_hidden_size or args.ffn_hidden_size)
    count = args.num_experts // args.expert_model_parallel_size
    if args.moe_grouped_gemm:  # Megatron orders these weights by kind, not by expert
        return shared, [weight for weight in one for _ in range(count)]
    return shared, one * count


def _two(args: Namespace, of: str, ffn: int) -> list[_Weight]:
    if not ffn:
        return []
    gated = args.swiglu or getattr(args, "quick_geglu", False)
    rows: Sections = ((Rows("", ffn),),) * (1 + gated)
    first: _Weight = f"{of}.linear_fc1", rows, args.hidden_size, 0
    return [first, _whole(f"{of}.linear_fc2", args.hidden_size, ffn, 1)]
