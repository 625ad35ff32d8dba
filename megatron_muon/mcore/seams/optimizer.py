"""Megatron's optimizers, their checkpoints, and the wrapper whose buffers they
shard.
"""

from megatron_muon.mcore.seams.row import Place, Row

_CORE = Place("megatron.core.optimizer")
_DISTRIB = Place("megatron.core.optimizer.distrib_optimizer")
_DIST = Place(_DISTRIB.module, "DistributedOptimizer")
_CONFIG = Place(_CORE.module, "OptimizerConfig")
_CPU = Place("megatron.core.optimizer.cpu_offloading")
_HYBRID = Place(_CPU.module, "HybridDeviceOptimizer")
_CHAIN = Place(_CORE.module, "ChainedOptimizer")
_BUFFERS = Place("megatron.core.distributed.param_and_grad_buffer")
_GROUP = Place(_BUFFERS.module, "_ParamAndGradBucketGroup")
_DISTRIBUTED = Place("megatron.core.distributed")
_DDP = Place(_DISTRIBUTED.module, "DistributedDataParallel")
# The first version that takes a layout of its grad buffers is 0.18.
_LAYOUTS = Place("megatron.core.optimizer.param_layout", "FullParamLayout", since=18)
_OFF = "refused if off"
_NORM = "the gradients that the norm counts"
_BUILDS = "builds a chain around Adam, which becomes Muon's"
_BELOW = "what a builder calls that was taken before install()"
# A run would miss one of these only at its first save.
_CKPT = Place("megatron.core.dist_checkpointing")
# Overridden to name the phase in the error where a peer is lost; replaced in a step
# that is traced.
SYNCS = (
    _GROUP.overridden("start_grad_sync", "starts the reduction of gradients"),
    _GROUP.overridden("finish_grad_sync", "waits for the reduction of gradients"),
    _GROUP.overridden("start_param_sync", "starts the all-gather of parameters"),
    _GROUP.overridden("finish_param_sync", "waits for the all-gather of parameters"),
)
ROWS: tuple[Row, ...] = (
    # --- settings
    _CORE.read("OptimizerConfig", "the settings of an optimizer"),
    *_CONFIG.has(
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
    *_CONFIG.has(
        since=14,
        reuse_grad_buf_for_mxfp8_param_ag="how mxfp8 parameters travel",
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=(
            "whether the inner Adam is to hold main parameters"
        ),
    ),
    *_CONFIG.has(since=15, decoupled_weight_decay=_OFF),
    _DISTRIBUTED.read("DistributedDataParallelConfig", "the settings of the wrapper"),
    *Place(_DISTRIBUTED.module, "DistributedDataParallelConfig").has(
        use_distributed_optimizer=_OFF,
        num_distributed_optimizer_instances="number of parts of a stage's ranks",
        fp8_param_gather="refused if on with another recipe than delayed scaling",
        overlap_param_gather="whether a forward pass gathers parameters",
    ),
    # --- communication
    _BUFFERS.subclassed(
        "_ParamAndGradBucketGroup", "what is reduced and gathered together"
    ),
    _GROUP.read(
        "check_grads", "the frame that raises for gradients that are not finite"
    ),
    *SYNCS,
    # --- its rates
    Place("megatron.core.optimizer_param_scheduler", "OptimizerParamScheduler").called(
        "step(increment)", "sets the groups' rates; by 0 once more, after a load"
    ),
    # --- making one
    _CORE.wrapped(
        "get_megatron_optimizer(config, model_chunks, no_weight_decay_cond)",
        _BUILDS,
        until=15,
    ),
    _CORE.wrapped(
        "get_megatron_optimizer(config, model_chunks, config_overrides, pg_collection)",
        _BUILDS,
        since=16,
    ),
    _CORE.replaced(
        "_get_param_groups(model_chunks)", "the parameter groups, which are cut"
    ),
    _CORE.called(
        "get_standard_config_overrides(config)", "Megatron's overrides", since=16
    ),
    _CORE.wrapped("_get_megatron_optimizer_based_on_param_groups(config)", _BELOW),
    _CORE.wrapped("_get_megatron_emerging_optimizer(config)", _BELOW, since=18),
    Place("megatron.core.optimizer.muon", since=16, until=17).wrapped(
        "get_megatron_muon_optimizer(config, model_chunks, "
        "layer_wise_distributed_optimizer, pg_collection)",
        "builds Megatron's own Muon",
    ),
    # --- classes of built optimizers, whose objects become ones of subclasses
    _CORE.subclassed("ChainedOptimizer", "the chain of dense and experts' optimizers"),
    _DISTRIB.subclassed(
        "DistributedOptimizer", "shards main parameters and state over DP ranks"
    ),
    _CORE.subclassed("Adam", "the Adam that Megatron picked: TE's, Apex's or torch's"),
    # --- states in fewer bytes
    _CONFIG.wrapped("__post_init__", "wants AdamW for use_precision_aware_optimizer"),
    # --- states on the host
    _CPU.subclassed("HybridDeviceOptimizer", "AdamW on the host, in parts"),
    _HYBRID.overridden(
        "_get_sub_optimizer_param_groups(offload_fraction)", "its shards"
    ),
    _HYBRID.overridden("step", "updates shards, and copies them to the weights"),
    _HYBRID.overridden("dummy_step", "makes state before a load"),
    _HYBRID.overridden(
        "_update_fp32_params_by_new_state", "called at the end of a load"
    ),
    _HYBRID.overridden("_init_sub_optimizers", "makes the parts anew"),
    _HYBRID.called("_sync_sub_optimizers_state_to_hdo", "takes the state of the parts"),
    _HYBRID.read(
        "sub_optimizers", "the parts, each torch's AdamW or the Adam of a GPU"
    ),
    *_HYBRID.has(
        state="the parts' state, by shard",
        param_to_inner_param="the main parameter of each shard",
        gpu_optimizer="the part on the device, if any",
        _d2h_stream="the stream that copies gradients to the host",
        _h2d_stream="the stream that copies shards to the weights",
    ),
    # --- the norm of gradients and the step
    # The norm is a float or, where Megatron does not wait for it, a tensor; the same
    # on all ranks of the grad_stats_parallel_group.
    _DIST.overridden("_copy_main_params_to_param_buffer", "mxfp8 parameters", since=14),
    _CHAIN.called(
        "prepare_model_params_for_param_sync", "the same for a chain", since=19
    ),
    _CHAIN.overridden("get_grad_norm", "called on every rank before a part steps"),
    _DIST.overridden("get_main_grads_for_grad_norm", _NORM, until=18, inherited=True),
    _DIST.overridden(
        "get_grads_for_grad_norm(grad_norm_group)", _NORM, since=19, inherited=True
    ),
    _DIST.overridden(
        "_unscale_main_grads_and_check_for_nan",
        "reduces the flag that skips a step",
        inherited=True,
    ),
    _DIST.overridden("_collect_main_grad_data_for_unscaling", "what that flag is of"),
    _CHAIN.called("grads_states_parallel_group_is_shared", "if its parts share a norm"),
    _CHAIN.overridden(
        "prepare_grads", "called before each step; True if it is skipped"
    ),
    _CHAIN.overridden("step_with_ready_grads", "steps its parts one after another"),
    _DIST.overridden("step_with_ready_grads", "steps, copies parameters"),
    _DIST.called("_copy_main_params_to_model_params", "writes clipped weights"),
    _DIST.overridden("_copy_model_params_to_main_params", "after a load of the model"),
    _DIST.called("get_grad_stats_parallel_group", "the ranks that step together"),
    _DIST.called(
        "get_parameters", "flat fp32 shards of the inner Adam", inherited=True
    ),
    # --- the loss scale, which the plugin makes dense and experts' optimizers share
    Place("megatron.core.optimizer.grad_scaler", "DynamicGradScaler").overridden(
        "update(found_inf)", "is told if a step overflowed; moves the scale"
    ),
    # --- shards and buffers
    _DIST.called(
        "_build_model_gbuf_range(param_and_grad_buffer, bucket_index)",
        "cuts each bucket into equal shards",
    ),
    _DIST.called(
        "compute_full_param_layout(bucket_size, data_parallel_world_size, "
        "expert_data_parallel_world_size)",
        "lays out all grad buffers",
        since=18,
    ),
    _DISTRIBUTED.read(
        "DistributedDataParallel", "the one wrapper whose buffers Muon shards over"
    ),
    _DDP.called("start_param_sync(force_sync)", "gathers all parameters, after a load"),
    _DDP.wrapped(
        "__init__(ddp_config, module, disable_bucketing)",
        "makes grad buffers",
        until=17,
    ),
    _DDP.wrapped(
        "__init__(ddp_config, module, disable_bucketing, full_param_layout)",
        "takes a layout",
        since=18,
    ),
    # --- a parameter's state, through which every format goes
    _DIST.overridden(
        "_get_main_param_and_optimizer_states(model_param)", "its tensors"
    ),
    _DIST.overridden(
        "_set_main_param_and_optimizer_states(model_param, tensors)", "the same"
    ),
    _DIST.called("_get_model_param_range_map(param)", "param: this rank's slice of it"),
    # --- state of no single parameter
    _DIST.overridden(
        "state_dict", "groups and loss scaler; adds the record of settings"
    ),
    _DIST.overridden("load_state_dict(state_dict)", "the same back; checks the record"),
    _DIST.overridden(
        "sharded_state_dict(model_sharded_state_dict, is_loading)",
        "calls the method of metadata's format",
    ),
    # --- torch and dp_zero_gather_scatter
    _DIST.overridden(
        "get_parameter_state_dp_zero", "gathers each grad buffer to the first rank"
    ),
    _DIST.overridden(
        "load_parameter_state_from_dp_zero(state_dict, update_legacy_format)",
        "scatters the same",
    ),
    _DIST.overridden(
        "sharded_param_state_dp_zero(model_sharded_state_dict, is_loading)",
        "dp_zero_gather_scatter",
    ),
    # --- the formats of 0.15 and later
    _DIST.overridden(
        "sharded_param_state_dp_reshardable(model_sharded_state_dict, is_loading)",
        "entries for each bucket",
        since=15,
    ),
    _DIST.overridden(
        "load_parameter_state_from_dp_reshardable(state_dict)",
        "the same back",
        since=15,
    ),
    _DIST.overridden(
        "sharded_param_state_fully_reshardable(model_sharded_state_dict, is_loading)",
        "by parameter's number",
        since=15,
    ),
    # --- the formats up to 0.14, which later ones still read
    _DIST.overridden(
        "sharded_param_state_fs_model_space(model_sharded_state_dict, is_loading)",
        "by parameter's number",
    ),
    _DIST.overridden(
        "sharded_param_state_fs_bucket_space(model_sharded_state_dict, is_loading)",
        "refused",
        until=14,
    ),
    _DISTRIB.read(
        "param_group_identifier_keys", "by which a load pairs groups", since=14
    ),
    # --- the chain
    _CHAIN.overridden(
        "state_dict", "state dicts of its optimizers, numbered if there are several"
    ),
    _CHAIN.overridden("load_state_dict(state_dict)", "the same back"),
    _CHAIN.overridden(
        "sharded_state_dict(model_sharded_state_dict, is_loading)",
        "the same for torch_dist",
    ),
    _CHAIN.overridden(
        "save_parameter_state(filename)", "torch: one file for all optimizers"
    ),
    _CHAIN.overridden(
        "load_parameter_state(filename, update_legacy_format)", "reads that file"
    ),
    _CHAIN.overridden(
        "_synchronize_steps", "gives every group the same step", since=14
    ),
    # --- dist_checkpointing
    _CKPT.wrapped(
        "save(sharded_state_dict, checkpoint_dir)",
        "writes torch_dist, or returns an AsyncRequest",
    ),
    _CKPT.wrapped(
        "load(sharded_state_dict, checkpoint_dir)", "reads torch_dist on every rank"
    ),
    _CKPT.replaced("load_content_metadata", "the format of a checkpoint", since=14),
    _CKPT.called(
        "load_tensors_metadata(checkpoint_dir)", "what the tensors on disk are"
    ),
    Place(_CKPT.module, "ShardedTensor").called(
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
    *_DIST.has(
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
    *_CHAIN.has(chained_optimizers="the optimizers in it", config="the run's settings"),
    *Place(_BUFFERS.module, "_ParamAndGradBuffer").has(
        param_index_map="(start, stop, bucket) of each parameter",
        buckets="in the order of their elements",
        numel_unpadded="elements of the tensors that Megatron gathers from it",
    ),
    *Place(_BUFFERS.module, "_ParamAndGradBucket").has(
        grad_data="all of the bucket's elements, padding too",
        offset="where the bucket begins in its buffer",
        numel_unpadded="elements of the bucket without padding",
    ),
    *_GROUP.has(
        buckets="what it reduces and gathers together",
        intra_distributed_optimizer_instance_group=(
            "who reduces and gathers its buckets"
        ),
    ),
    *_DDP.has(
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

# Keys of a parameter group, which NeMo writes with a prefix, pre_. They are keys of a
# dict, so they can only be checked once an optimizer is built.
GROUP_KEYS = {
    "is_expert_parallel": "whether its parameters are experts'",
    "is_decoupled_lr": "pairs groups at a load",
    "lr_mult": "pairs groups at a load",
    "wd_mult": "pairs groups at a load",
}
