"""Megatron's models as far as the plugin uses them: classes, settings, and marks on parameters."""

from __future__ import annotations

from megatron_muon.mcore.seams.row import NEWEST, OLDEST, Attribute, Seam, Version

_LAYERS = "megatron.core.tensor_parallel.layers"
_MIXER = "megatron.core.ssm.mamba_mixer"
_DELTA = "megatron.core.ssm.gated_delta_net"
_ATTENTION = "megatron.core.transformer.attention"
_CORE_ATTENTION = "megatron.core.transformer.dot_product_attention"
_MLA_CONFIG = "megatron.core.transformer.transformer_config"
_MLA = "megatron.core.transformer.multi_latent_attention"
_LANGUAGE = "megatron.core.models.common.language_module.language_module"


def _setting(
    module: str, owner: str, name: str, relied_on: str, since: Version, until: Version
) -> Attribute:
    return Attribute(module, owner, name, relied_on, since=since, until=until)


def _of_model(
    name: str, relied_on: str, since: Version = OLDEST, until: Version = NEWEST
) -> Attribute:
    return _setting("megatron.core.transformer", "TransformerConfig", name, relied_on, since, until)


def _of_optimizer(
    name: str, relied_on: str, since: Version = OLDEST, until: Version = NEWEST
) -> Attribute:
    return _setting("megatron.core.optimizer", "OptimizerConfig", name, relied_on, since, until)


def _of_ddp(
    name: str, relied_on: str, since: Version = OLDEST, until: Version = NEWEST
) -> Attribute:
    owner = "DistributedDataParallelConfig"
    return _setting("megatron.core.distributed", owner, name, relied_on, since, until)


def _mark(module: str, name: str, relied_on: str, since: Version = OLDEST) -> Attribute:
    return Attribute(module, "", name, relied_on, since=since)


SEAMS = (
    Seam("megatron.core", "__version__", "read", "which rows hold here"),
    Seam(
        "megatron.core.utils",
        "get_model_config",
        "called",
        "the TransformerConfig of a model that may be wrapped",
        ("model",),
    ),
    Seam(
        "megatron.core.fp8_utils",
        "is_float8tensor",
        "called",
        "whether a weight is one of Transformer Engine's in fp8",
        ("tensor",),
    ),
    Seam("megatron.core.transformer", "TransformerConfig", "read", "the settings of a model"),
    Seam("megatron.core.optimizer", "OptimizerConfig", "read", "the settings of an optimizer"),
    Seam(
        "megatron.core.distributed",
        "DistributedDataParallelConfig",
        "read",
        "the settings of the wrapper",
    ),
    Seam(
        "megatron.core.tensor_parallel",
        "VocabParallelEmbedding",
        "read",
        "the class of embeddings, which AdamW updates",
    ),
    Seam(
        _LAYERS,
        "param_is_not_tensor_parallel_duplicate",
        "called",
        "whether Megatron counts a main parameter's gradient here, by its mark or the rank's place",
        ("param",),
    ),
    Seam(
        "megatron.core.transformer.attention",
        "SelfAttention",
        "read",
        "the class whose linear_qkv has query groups of q, k and v rows",
    ),
    Seam(
        "megatron.core.transformer.attention",
        "CrossAttention",
        "read",
        "the class whose linear_kv has heads of k and v rows",
    ),
    # --- attention logits
    Seam(_ATTENTION, "Attention", "read", "the class of all attentions with a core_attention"),
    Seam(_MLA, "MLASelfAttention", "read", "the class whose up-projections are clipped"),
    Seam(
        _CORE_ATTENTION,
        "DotProductAttention",
        "read",
        "the attention whose softmax module gets all scaled logits, and the mask",
    ),
    Seam(
        "megatron.core.fusions.fused_softmax",
        "FusedScaleMaskSoftmax.forward",
        "called",
        "a hook before it reads its first arguments: logits (batch, heads, queries, keys) and mask",
        ("input", "mask"),
    ),
    Seam("megatron.core.transformer.enums", "AttnMaskType", "read", "whether a mask is causal"),
    Seam(
        "megatron.core.optimizer.qk_clip",
        "clip_qk",
        "wrapped",
        "called after each step; wrapped to clip shards of main parameters, not whole ones",
        ("model", "log_max_only"),
        since=(0, 16),
    ),
)

_ROWS = "which rows of latent attention are a head's or a latent's"
_PARTS = "which rows of in_proj are which part's"
_REFUSED = "refused if on, since Muon does not support it yet"
_EARLY = "refused with fp16 or experts, where Megatron trains wrongly"
ATTRIBUTES = (
    # --- settings
    _of_model("num_moe_experts", "whether there are experts, and how many"),
    _of_model("expert_model_parallel_size", "how many ranks share a layer's experts"),
    _of_model("expert_tensor_parallel_size", "how many ranks share an expert's weights"),
    _of_model("tensor_model_parallel_size", "how many ranks share a dense weight"),
    _of_model("hidden_size", "rows of the legacy grouped experts' weight"),
    _of_model("gated_linear_unit", "whether linear_fc1 has two halves"),
    _of_model("num_attention_heads", "which rows of linear_qkv are q, k and v"),
    _of_model("num_query_groups", "which rows of linear_qkv are q, k and v"),
    _of_model("kv_channels", "which rows of linear_qkv are q, k and v"),
    _of_model("attention_output_gate", "which rows of linear_qkv are q, k and v", (0, 16)),
    *(
        _setting("megatron.core.transformer", "MLATransformerConfig", name, _ROWS, OLDEST, NEWEST)
        for name in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "kv_lora_rank")
    ),
    _setting(
        "megatron.core.transformer", "MLATransformerConfig", "q_lora_rank", _ROWS, OLDEST, NEWEST
    ),
    _of_model("moe_mlp_glu_interleave_size", "blocks of gate and up rows", (0, 18)),
    _of_model("moe_shared_expert_glu_interleave_size", "blocks of gate and up rows", (0, 19)),
    _of_model("fp8_param", "refused if on with another recipe than delayed scaling"),
    _of_model("fp8_recipe", "how fp8 parameters are scaled"),
    _of_model("fp4_param", _REFUSED, (0, 15)),
    _of_model("moe_single_grouped_weight", _REFUSED, (0, 18)),
    _of_model("qk_clip", "whether attention logits are clipped", (0, 16)),
    _of_model("qk_clip_threshold", "from which logit on", (0, 16)),
    _of_model("qk_clip_alpha", "the queries' share of a clip", (0, 16)),
    _of_model("log_max_attention_logit", "whether attention logits are watched", (0, 16)),
    _of_model("qk_layernorm", "whether queries and keys are normalized after their projection"),
    _of_optimizer("optimizer", "whether it is muon; adam while Megatron builds"),
    _of_optimizer("use_distributed_optimizer", "refused if off"),
    _of_optimizer("decoupled_weight_decay", "refused if off", (0, 15)),
    _of_optimizer("use_precision_aware_optimizer", _REFUSED),
    _of_optimizer("optimizer_cpu_offload", _REFUSED),
    _of_optimizer("optimizer_cuda_graph", _REFUSED, (0, 17)),
    _of_optimizer("overlap_param_gather_with_optimizer_step", _EARLY),
    _of_optimizer("fp16", "whether there is a loss scaler"),
    _of_optimizer("bf16", "whether a checkpoint's main parameters are the weights themselves"),
    _of_optimizer("clip_grad", "whether gradients are clipped before momentum adds them"),
    _of_optimizer("timers", "Megatron's timers, which the step's phases are recorded in"),
    _of_ddp("use_distributed_optimizer", "refused if off"),
    _of_ddp("num_distributed_optimizer_instances", "number of parts of a stage's ranks"),
    _of_ddp("fp8_param_gather", "refused if on with another recipe than delayed scaling"),
    _of_ddp("overlap_param_gather", "early_param_gather (--muon-early-param-gather) is for it"),
    _of_ddp("use_megatron_fsdp", _REFUSED, (0, 14)),
    _of_ddp("use_custom_fsdp", _REFUSED),
    # --- modules
    Attribute(
        "megatron.core.transformer.attention",
        "SelfAttention",
        "linear_qkv",
        "the fused projection of q, k and v",
    ),
    Attribute(
        "megatron.core.transformer.attention",
        "CrossAttention",
        "linear_kv",
        "the fused projection of k and v",
    ),
    Attribute(
        "megatron.core.transformer.attention",
        "SelfAttention",
        "config",
        "the settings that an attention was built from",
    ),
    Attribute(_ATTENTION, "Attention", "core_attention", "the module that computes logits"),
    *(
        Attribute(_MLA, "MLASelfAttention", linear, "its weight has the heads' rows one by one")
        for linear in ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
    ),
    *(
        Attribute(_MLA_CONFIG, "MLATransformerConfig", name, "rows of a head's parts")
        for name in ("q_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    ),
    Attribute(_CORE_ATTENTION, "DotProductAttention", "scale_mask_softmax", "gets all logits"),
    *(
        Attribute("megatron.core.fusions.fused_softmax", "FusedScaleMaskSoftmax", name, why)
        for name, why in (
            ("attn_mask_type", "whether a mask that is not given is causal"),
            ("scale", "a factor of the logits that the softmax itself applies"),
        )
    ),
    Attribute(
        "megatron.core.transformer.transformer_layer",
        "TransformerLayer",
        "layer_number",
        "a layer's number over all pipeline stages, from 1 on",
    ),
    Attribute(
        "megatron.core.transformer.attention",
        "CrossAttention",
        "linear_q",
        "the projection of q, which heads split",
    ),
    Attribute(_ATTENTION, "Attention", "core_attention", "the module that computes logits"),
    *(
        Attribute(_MIXER, "MambaMixer", name, _PARTS, part="hybrid")
        for name in ("d_inner", "ngroups", "d_state", "nheads")
    ),
    *(
        Attribute(_DELTA, "GatedDeltaNet", name, _PARTS, False, (0, 16), (0, 18), "hybrid")
        for name in ("qk_dim", "v_dim", "num_value_heads")
    ),
    *(
        Attribute(f"{_DELTA}.gdn", "GatedDeltaNet", name, _PARTS, since=(0, 19), part="hybrid")
        for name in ("in_proj_split_sections", "in_proj_split_names", "tp_size")
    ),
    # --- marks on parameters
    _mark(_LAYERS, "tensor_model_parallel", "whether TP splits it"),
    _mark(_LAYERS, "partition_dim", "the dim that TP splits"),
    _mark(_LAYERS, "allreduce", "False on experts' weights, which have buffers of their own"),
    _mark(_LAYERS, "is_gtp_weight_remat", "generalized tensor parallelism: refused", (0, 19)),
    _mark(_LANGUAGE, "is_embedding_or_output_parameter", "an embedding or output: AdamW's"),
    _mark(_LANGUAGE, "shared_embedding", "a tied embedding, whose copies need one optimizer"),
    _mark(_LANGUAGE, "shared", "the last stage's copy of a tied embedding"),
)
