"""What of Megatron's and torch's a run calls or reads, beyond what it wraps.

A run that lacks one ends where it uses it, by Python's own error with the name.
``doctor`` says so before, for all of them.
"""

from megatron_muon.lab.dry_run.seams import STATE, VARIABLES
from megatron_muon.mcore.seams.model import LAYERS
from megatron_muon.mcore.seams.optimizer import (
    BUFFERS,
    CHAIN,
    CKPT,
    CONFIG,
    DDP,
    DIST,
    DISTRIB,
    DISTRIBUTED,
    GROUP,
    HYBRID_OPTIMIZER,
    OPTIMIZERS,
)
from megatron_muon.mcore.seams.row import Place, Row
from megatron_muon.mcore.seams.training import CHECKPOINTS, INITIALIZE

# --- torch's internals, which a release may change without notice

_TORCH = (
    *(
        Place("torch").called(f"_foreach_{name}", "one kernel for a list of tensors")
        for name in ("add_", "copy_", "mul", "mul_", "norm", "sign_", "sub_")
    ),
    Place("torch.distributed.distributed_c10d").called(
        "_get_default_store", "where the first rank to compare settings says if it asks"
    ),
    Place("torch._C").called(
        "PyTorchFileReader", "reads the archives that torch.save writes"
    ),
    Place("torch._C._profiler").called(
        "_RecordFunctionFast", "a range in traces, where no profiler is on here"
    ),
    Place("torch.autograd").called(
        "_profiler_enabled", "whether a profiler is on already"
    ),
)

# --- Megatron's optimizers, their checkpoints, and the wrapper whose buffers they shard

# The first version that takes a layout of its grad buffers is 0.18.
_LAYOUTS = Place("megatron.core.optimizer.param_layout", "FullParamLayout", since=18)
_DDP_CONFIG = Place(DISTRIBUTED.module, "DistributedDataParallelConfig")
_OFF = "refused if off"
OPTIMIZER: tuple[Row, ...] = (
    # --- settings
    *CONFIG.has(
        optimizer="whether it is muon; adam while Megatron builds",
        use_distributed_optimizer=_OFF,
        overlap_param_gather_with_optimizer_step=(
            "refused with fp16 or experts, where Megatron trains wrongly"
        ),
        fp16="whether there is a loss scaler",
        bf16="whether weights lack 16 bits of an fp32 number",
        clip_grad="whether gradients are clipped before momentum adds them",
        timers="Megatron's timers, which the step's phases are recorded in",
        use_precision_aware_optimizer="whether the inner Adam is to hold such states",
        optimizer_cpu_offload="whether the inner optimizer is the hybrid one",
        optimizer_offload_fraction="the part of state that is on the host",
        exp_avg_dtype="the momentum's dtype",
        exp_avg_sq_dtype="the dtype of second moments",
    ),
    *CONFIG.has(
        since=14,
        reuse_grad_buf_for_mxfp8_param_ag="how mxfp8 parameters travel",
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=(
            "whether the inner Adam is to hold main parameters"
        ),
    ),
    *CONFIG.has(since=15, decoupled_weight_decay=_OFF),
    DISTRIBUTED.read("DistributedDataParallelConfig", "the settings of the wrapper"),
    *_DDP_CONFIG.has(
        use_distributed_optimizer=_OFF,
        num_distributed_optimizer_instances="number of parts of a stage's ranks",
        fp8_param_gather="refused if on with another recipe than delayed scaling",
        overlap_param_gather="whether a forward pass gathers parameters",
    ),
    # --- communication
    GROUP.read(
        "check_grads", "the frame that raises for gradients that are not finite"
    ),
    # --- its rates
    Place("megatron.core.optimizer_param_scheduler", "OptimizerParamScheduler").called(
        "step(increment)", "sets the groups' rates; by 0 once more, after a load"
    ),
    # --- making one
    OPTIMIZERS.called(
        "get_standard_config_overrides(config)", "Megatron's overrides", since=16
    ),
    # --- states on the host
    HYBRID_OPTIMIZER.called(
        "_sync_sub_optimizers_state_to_hdo", "takes the state of the parts"
    ),
    HYBRID_OPTIMIZER.read(
        "sub_optimizers", "the parts, each torch's AdamW or the Adam of a GPU"
    ),
    *HYBRID_OPTIMIZER.has(
        state="the parts' state, by shard",
        param_to_inner_param="the main parameter of each shard",
        gpu_optimizer="the part on the device, if any",
        _d2h_stream="the stream that copies gradients to the host",
        _h2d_stream="the stream that copies shards to the weights",
    ),
    # --- the norm of gradients and the step
    CHAIN.called(
        "prepare_model_params_for_param_sync", "the same for a chain", since=19
    ),
    CHAIN.called("grads_states_parallel_group_is_shared", "if its parts share a norm"),
    DIST.called("_copy_main_params_to_model_params", "writes clipped weights"),
    DIST.called("get_grad_stats_parallel_group", "the ranks that step together"),
    DIST.called("get_parameters", "flat fp32 shards of the inner Adam", inherited=True),
    # --- shards and buffers
    DIST.called(
        "_build_model_gbuf_range(param_and_grad_buffer, bucket_index)",
        "cuts each bucket into equal shards",
    ),
    DIST.called(
        "compute_full_param_layout(bucket_size, data_parallel_world_size, "
        "expert_data_parallel_world_size)",
        "lays out all grad buffers",
        since=18,
    ),
    DDP.called("start_param_sync(force_sync)", "gathers all parameters, after a load"),
    # --- a parameter's state, through which every format goes
    DIST.called("_get_model_param_range_map(param)", "param: this rank's slice of it"),
    # --- the formats up to 0.14, which later ones still read
    DISTRIB.read(
        "param_group_identifier_keys", "by which a load pairs groups", since=14
    ),
    # --- dist_checkpointing
    CKPT.called(
        "load_tensors_metadata(checkpoint_dir)", "what the tensors on disk are"
    ),
    Place(CKPT.module, "ShardedTensor").called(
        "from_rank_offsets(key, data, replica_id)", "a whole tensor on disk"
    ),
    Place("megatron.core.dist_checkpointing.mapping").read(
        "ShardedTensor(key, data, dtype, global_shape, global_offset)",
        "a rank's part of a tensor on disk, copied",
    ),
    Place("megatron.core.dist_checkpointing.strategies.async_utils").read(
        "AsyncRequest(async_fn, finalize_fns)", "calls finalize_fns in order after it"
    ),
    Place("megatron.core.dist_checkpointing.validation", since=19).called(
        "save_integrity_manifest(checkpoint_dir)", "hashes all files"
    ),
    Place("megatron.core.dist_checkpointing.serialization").read(
        "logger", "silenced where the digest's mark is the only file"
    ),
    # --- attributes
    *DIST.has(
        model_chunks="the DDP-wrapped modules, for names and marks of parameters",
        is_stub_optimizer="True on a rank that has no groups and never steps",
        config="its timers, and the run's settings",
        grad_scaler="None, or the loss scaler, which all optimizers share",
        distributed_optimizer_instance_id="which of several instances it is in",
        optimizer="the inner Adam: param_groups of flat shards, and its state",
        init_state_fn="fills the inner optimizer's state before a load",
        data_parallel_group="the ranks that each bucket is cut over",
        data_parallel_group_idx="the model-parallel rank, in dp_reshardable's keys",
        ddp_config="num_distributed_optimizer_instances",
        buffers="each with param_index_map (start, stop, bucket) and buckets",
        gbuf_ranges="by buffer, dtypes and bucket: the slices that this rank has",
        per_bucket_numel_unpadded="sizes that dp_reshardable compares at a load",
        model_param_group_index_map="the parameter group of a model parameter",
        model_float16_groups="parameters, as in shard_fp32_from_float16_groups",
        shard_fp32_from_float16_groups="their flat fp32 main parameters",
        shard_float16_groups="slices of weights, if Adam has main parameters",
        model_fp32_groups="parameters in step with shard_fp32_groups",
        shard_fp32_groups="flat views of them",
    ),
    *CHAIN.has(chained_optimizers="the optimizers in it", config="the run's settings"),
    *Place(BUFFERS.module, "_ParamAndGradBuffer").has(
        param_index_map="(start, stop, bucket) of each parameter",
        buckets="in the order of their elements",
        numel_unpadded="elements of the tensors that Megatron gathers from it",
    ),
    *Place(BUFFERS.module, "_ParamAndGradBucket").has(
        grad_data="all of the bucket's elements, padding too",
        offset="where the bucket begins in its buffer",
        numel_unpadded="elements of the bucket without padding",
    ),
    *GROUP.has(
        buckets="what it reduces and gathers together",
        intra_distributed_optimizer_instance_group=(
            "who reduces and gathers its buckets"
        ),
    ),
    *DDP.has(
        bucket_groups="bucket groups of dense weights, whose errors name the phase",
        expert_parallel_bucket_groups="bucket groups of experts' weights",
        buffers="the grad buffers of dense weights",
        expert_parallel_buffers="the grad buffers of experts' weights",
        ddp_config="whether the distributed optimizer and its overlaps are on",
        module="the model inside",
    ),
    *_LAYOUTS.has(layouts="the layout of each grad buffer"),
    *Place(_LAYOUTS.module, "PerBufferParamLayout", since=18).has(
        param_index_map="(start, stop, bucket) of a parameter",
        bucket_indices="(start, stop) of each bucket",
        per_bucket_numel_unpadded="elements without padding",
    ),
)

# --- Megatron's models and process groups

_TRANSFORMER = Place("megatron.core.transformer")
_ATTENTION = Place("megatron.core.transformer.attention")
_LATENT = Place("megatron.core.transformer.multi_latent_attention", "MLASelfAttention")
_DOT_PRODUCT = Place(
    "megatron.core.transformer.dot_product_attention", "DotProductAttention"
)
_SOFTMAX = Place("megatron.core.fusions.fused_softmax", "FusedScaleMaskSoftmax")
# Classes of which attributes are read.
_MODEL = Place(_TRANSFORMER.module, "TransformerConfig")

_QKV = "which rows of linear_qkv are q, k and v"
_ROWS = "which rows of latent attention are a head's or a latent's"
_PARTS = "which rows of in_proj are which part's"
_TP = "the ranks that share a dense weight"
_EP = "the ranks that share a layer's experts"
_BLOCKS = "blocks of gate and up rows"
_REFUSED = "refused if on, since Muon does not support it yet"
_STAGE = "the ranks of a stage"
_EXPERT_TP = "the ranks that share an expert's weights"
MODEL: tuple[Row, ...] = (
    # --- classes and functions
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
    _ATTENTION.read(
        "SelfAttention", "its linear_qkv has query groups of q, k and v rows"
    ),
    _ATTENTION.read("CrossAttention", "its linear_kv has heads of k and v rows"),
    # --- attention logits
    _ATTENTION.read("Attention", "the class of all attentions with a core_attention"),
    Place(_LATENT.module).read("MLASelfAttention", "its up-projections are clipped"),
    Place(_DOT_PRODUCT.module).read(
        "DotProductAttention", "its softmax gets all logits and a mask"
    ),
    Place("megatron.core.transformer.identity_op").read(
        "IdentityOp", "an attention's norm that does nothing"
    ),
    _SOFTMAX.called(
        "forward(input, mask)", "logits (batch, heads, queries, keys) and mask"
    ),
    Place("megatron.core.transformer.enums").read(
        "AttnMaskType", "whether a mask is causal"
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
        q_layernorm="normalizes queries, where it is a norm",
        k_layernorm="normalizes keys, where it is a norm",
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
    *_DOT_PRODUCT.has(scale_mask_softmax="gets all logits"),
    *_SOFTMAX.has(
        attn_mask_type="whether the mask is causal where none is passed",
        scale="a factor of the logits that the softmax itself applies",
    ),
    *Place("megatron.core.transformer.transformer_layer", "TransformerLayer").has(
        layer_number="a layer's number over all pipeline stages, from 1 on"
    ),
    # --- process groups
    STATE.called("get_tensor_and_data_parallel_group(with_context_parallel)", _STAGE),
    STATE.called("get_tensor_model_parallel_group", _TP),
    STATE.called("get_expert_tensor_parallel_group", _EXPERT_TP),
    STATE.called("get_expert_model_parallel_group", _EP),
    STATE.called(
        "get_pipeline_model_parallel_rank", "the number of the pipeline stage"
    ),
    STATE.called("get_expert_model_parallel_rank", "which experts this rank has"),
    STATE.called("get_expert_model_parallel_world_size", _EP),
    STATE.called("get_tensor_model_parallel_world_size", _TP),
    STATE.called("get_expert_tensor_parallel_world_size", _EXPERT_TP),
    STATE.called("get_pipeline_model_parallel_group", "the pipeline stages"),
    STATE.called(
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
)
# Read to refuse what Muon does not support, or to skip a step on all ranks: a Megatron
# that lacks one has nothing to refuse or skip.
REFUSALS = (
    *_MODEL.has(since=15, fp4_param=_REFUSED),
    *_MODEL.has(
        since=18, moe_single_grouped_weight=_REFUSED, moe_single_grouped_bias=_REFUSED
    ),
    *CONFIG.has(since=17, optimizer_cuda_graph=_REFUSED),
    *CONFIG.has(since=19, grad_norm_skip_threshold="the norm that skips a step"),
    *_DDP_CONFIG.has(since=14, use_megatron_fsdp=_REFUSED),
    *_DDP_CONFIG.has(use_custom_fsdp=_REFUSED),
    *LAYERS.has(since=19, is_gtp_weight_remat=_REFUSED),
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

# --- Megatron-LM's scripts, checked where they are installed

TRAINING = (
    # --- the launcher
    Place("megatron.core.datasets.utils").called(
        "compile_helpers", "compiles the dataset helper, or exits"
    ),
    # --- arguments
    INITIALIZE.called(
        "parse_args(extra_args_provider, ignore_unknown_args)",
        "parses before initialize_megatron asks for a GPU",
        until=17,
    ),
    Place("megatron.training").called("get_args", "the arguments of the run"),
    VARIABLES.called(
        "get_tensorboard_writer", "the last rank's SummaryWriter, else None"
    ),
    VARIABLES.called(
        "get_wandb_writer", "the wandb module on the last rank, else None"
    ),
    # --- checkpoints
    CHECKPOINTS.called(
        "get_checkpoint_name(checkpoints_path, iteration, release, return_base_dir)",
        "a checkpoint's folder; torch: a rank's file",
    ),
    CHECKPOINTS.called(
        "get_distributed_optimizer_checkpoint_name(model_checkpoint_name)",
        "torch: the file of state",
    ),
    CHECKPOINTS.called(
        "checkpoint_exists(checkpoints_path)", "whether there is a tracker"
    ),
    CHECKPOINTS.read(
        "_NON_PERSISTENT_CKPT_SUBDIR", "where non-persistent checkpoints are"
    ),
)
ROWS: tuple[Row, ...] = (*MODEL, *OPTIMIZER, *_TORCH)
