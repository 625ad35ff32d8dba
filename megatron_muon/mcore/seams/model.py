"""Megatron's models and process groups as far as the plugin uses them."""

from megatron_muon.mcore.seams.row import Place, Row

_TRANSFORMER = Place("megatron.core.transformer")
_ATTENTION = Place("megatron.core.transformer.attention")
_LATENT = Place("megatron.core.transformer.multi_latent_attention", "MLASelfAttention")
_CORE = Place("megatron.core.transformer.dot_product_attention", "DotProductAttention")
_SOFTMAX = Place("megatron.core.fusions.fused_softmax", "FusedScaleMaskSoftmax")
_LAYERS = Place("megatron.core.tensor_parallel.layers")
# Classes of which attributes are read.
_MODEL = Place(_TRANSFORMER.module, "TransformerConfig")
_OPTIM = Place("megatron.core.optimizer", "OptimizerConfig")
_DDP = Place("megatron.core.distributed", "DistributedDataParallelConfig")

_QKV = "which rows of linear_qkv are q, k and v"
_ROWS = "which rows of latent attention are a head's or a latent's"
_PARTS = "which rows of in_proj are which part's"
_TP = "the ranks that share a dense weight"
_EP = "the ranks that share a layer's experts"
_BLOCKS = "blocks of gate and up rows"
_REFUSED = "refused if on, since Muon does not support it yet"
_STATE = Place("megatron.core.parallel_state")
_STAGE = "the ranks of a stage"
_EXPERT_TP = "the ranks that share an expert's weights"
ROWS: tuple[Row, ...] = (
    # --- classes and functions
    Place("megatron.core").read("__version__", "which rows hold here"),
    Place("megatron.core.utils").called(
        "get_model_config(model)", "its TransformerConfig"
    ),
    Place("megatron.core.fp8_utils").called(
        "is_float8tensor(tensor)", "a weight in fp8"
    ),
    _TRANSFORMER.read("TransformerConfig", "the settings of a model"),
    Place("megatron.core.tensor_parallel").read(
        "VocabParallelEmbedding", "embeddings: AdamW's"
    ),
    _LAYERS.called(
        "param_is_not_tensor_parallel_duplicate(param)", "if the norm counts it"
    ),
    _ATTENTION.read(
        "SelfAttention", "its linear_qkv has query groups of q, k and v rows"
    ),
    _ATTENTION.read("CrossAttention", "its linear_kv has heads of k and v rows"),
    # --- attention logits
    _ATTENTION.read("Attention", "the class of all attentions with a core_attention"),
    Place(_LATENT.module).read("MLASelfAttention", "its up-projections are clipped"),
    Place(_CORE.module).read(
        "DotProductAttention", "its softmax gets all logits and a mask"
    ),
    _SOFTMAX.called(
        "forward(input, mask)", "logits (batch, heads, queries, keys) and mask"
    ),
    Place("megatron.core.transformer.enums").read(
        "AttnMaskType", "whether a mask is causal"
    ),
    Place("megatron.core.optimizer.qk_clip", since=16).wrapped(
        "clip_qk(model, log_max_only)", "called after each step; clips shards"
    ),
    # --- settings
    *_MODEL.has(
        num_moe_experts="whether there are experts, and how many",
        expert_model_parallel_size=_EP,
        expert_tensor_parallel_size=_EXPERT_TP,
        tensor_model_parallel_size=_TP,
        hidden_size="rows of the legacy grouped experts' weight",
        gated_linear_unit="whether linear_fc1 has two halves",
        num_attention_heads=_QKV,
        num_query_groups=_QKV,
        kv_channels=_QKV,
        fp8_param="refused if on with another recipe than delayed scaling",
        fp8_recipe="how fp8 parameters are scaled",
        qk_layernorm="whether queries and keys are normalized after their projection",
    ),
    *_MODEL.has(
        since=16,
        attention_output_gate=_QKV,
        qk_clip="whether attention logits are clipped",
        qk_clip_threshold="from which logit on",
        qk_clip_alpha="the queries' share of a clip",
        log_max_attention_logit="whether attention logits are watched",
    ),
    *Place(_TRANSFORMER.module, "MLATransformerConfig").has(
        qk_head_dim=_ROWS,
        qk_pos_emb_head_dim=_ROWS,
        v_head_dim=_ROWS,
        kv_lora_rank=_ROWS,
        q_lora_rank=_ROWS,
    ),
    *_MODEL.has(since=18, moe_mlp_glu_interleave_size=_BLOCKS),
    *_MODEL.has(since=19, moe_shared_expert_glu_interleave_size=_BLOCKS),
    # --- modules
    *Place(_ATTENTION.module, "SelfAttention").has(
        linear_qkv="the fused projection of q, k and v",
        config="the settings that an attention was built from",
    ),
    *Place(_ATTENTION.module, "CrossAttention").has(
        linear_kv="the fused projection of k and v",
        linear_q="the projection of q, which heads split",
    ),
    *Place(_ATTENTION.module, "Attention").has(
        core_attention="the module that computes logits"
    ),
    *_LATENT.has(
        linear_q_proj="its weight has the heads' rows one by one",
        linear_q_up_proj="its weight has the heads' rows one by one",
        linear_kv_up_proj="its weight has the heads' rows one by one",
    ),
    *_CORE.has(scale_mask_softmax="gets all logits"),
    *_SOFTMAX.has(
        attn_mask_type="whether the mask is causal where none is passed",
        scale="a factor of the logits that the softmax itself applies",
    ),
    *Place("megatron.core.transformer.transformer_layer", "TransformerLayer").has(
        layer_number="a layer's number over all pipeline stages, from 1 on"
    ),
    # --- process groups
    _STATE.called("get_tensor_and_data_parallel_group(with_context_parallel)", _STAGE),
    _STATE.called("get_tensor_model_parallel_group", _TP),
    _STATE.called("get_expert_tensor_parallel_group", _EXPERT_TP),
    _STATE.called("get_expert_model_parallel_group", _EP),
    _STATE.called(
        "get_pipeline_model_parallel_rank", "the number of the pipeline stage"
    ),
    _STATE.called("get_expert_model_parallel_rank", "which experts this rank has"),
    _STATE.called("get_expert_model_parallel_world_size", _EP),
    _STATE.called("get_tensor_model_parallel_world_size", _TP),
    _STATE.called("get_expert_tensor_parallel_world_size", _EXPERT_TP),
    _STATE.called("get_pipeline_model_parallel_group", "the pipeline stages"),
    _STATE.called(
        "get_data_parallel_group(with_context_parallel, partial_data_parallel)",
        "how many shards a grad buffer has, inside one optimizer instance",
    ),
    # A caller may pass any object with these attributes; Megatron's class has them.
    *Place(
        "megatron.core.process_groups_config", "ProcessGroupCollection", since=15
    ).has(
        tp=_TP,
        expt_tp=_EXPERT_TP,
        ep=_EP,
        pp="the pipeline stages",
        tp_dp_cp=_STAGE,
        dp_cp="the ranks that shard a buffer of dense weights",
        intra_dp_cp="the same ranks, within one optimizer instance",
        dp="the same ranks, without context parallelism",
    ),
    # --- marks on parameters
    *_LAYERS.has(
        tensor_model_parallel="whether TP splits it",
        partition_dim="the dim that TP splits",
        sequence_parallel="its gradient is added up over TP ranks",
        allreduce="False on experts' weights, which have buffers of their own",
    ),
    *Place("megatron.core.models.common.language_module.language_module").has(
        is_embedding_or_output_parameter="an embedding or output: AdamW's",
        shared_embedding="a tied embedding, whose copies need one optimizer",
        shared="the last stage's copy of a tied embedding",
    ),
)
# Read to refuse what Muon does not support, or to skip a step on all ranks: a Megatron
# that lacks one has nothing to refuse or skip.
REFUSALS = (
    *_MODEL.has(since=15, fp4_param=_REFUSED),
    *_MODEL.has(
        since=18, moe_single_grouped_weight=_REFUSED, moe_single_grouped_bias=_REFUSED
    ),
    *_OPTIM.has(since=17, optimizer_cuda_graph=_REFUSED),
    *_OPTIM.has(since=19, grad_norm_skip_threshold="the norm that skips a step"),
    *_DDP.has(since=14, use_megatron_fsdp=_REFUSED),
    *_DDP.has(use_custom_fsdp=_REFUSED),
    *_LAYERS.has(since=19, is_gtp_weight_remat=_REFUSED),
)
# Modules whose import needs packages of kernels, so that no run's start checks them.
HYBRID = (
    *Place("megatron.core.ssm.mamba_mixer", "MambaMixer").has(
        d_inner=_PARTS, ngroups=_PARTS, d_state=_PARTS, nheads=_PARTS
    ),
    *Place("megatron.core.ssm.gated_delta_net", "GatedDeltaNet", 16, 18).has(
        qk_dim=_PARTS, v_dim=_PARTS, num_value_heads=_PARTS
    ),
    *Place("megatron.core.ssm.gated_delta_net.gdn", "GatedDeltaNet", since=19).has(
        in_proj_split_sections=_PARTS, in_proj_split_names=_PARTS, tp_size=_PARTS
    ),
)
