"""Megatron's optimizers, their checkpoints, and the wrapper whose buffers they
shard.
"""

from megatron_muon.mcore.seams.row import Place, Row

OPTIMIZERS = Place("megatron.core.optimizer")
DISTRIB = Place("megatron.core.optimizer.distrib_optimizer")
DIST = Place(DISTRIB.module, "DistributedOptimizer")
CONFIG = Place(OPTIMIZERS.module, "OptimizerConfig")
CPU_OFFLOADING = Place("megatron.core.optimizer.cpu_offloading")
HYBRID_OPTIMIZER = Place(CPU_OFFLOADING.module, "HybridDeviceOptimizer")
CHAIN = Place(OPTIMIZERS.module, "ChainedOptimizer")
BUFFERS = Place("megatron.core.distributed.param_and_grad_buffer")
GROUP = Place(BUFFERS.module, "_ParamAndGradBucketGroup")
DISTRIBUTED = Place("megatron.core.distributed")
DDP = Place(DISTRIBUTED.module, "DistributedDataParallel")
_NORM = "the gradients that the norm counts"
_BUILDS = "builds a chain around Adam, which becomes Muon's"
_BELOW = "what a builder calls that was taken before install()"
# A run would miss one of these only at its first save.
CKPT = Place("megatron.core.dist_checkpointing")
ROWS: tuple[Row, ...] = (
    # --- communication
    BUFFERS.subclassed(
        "_ParamAndGradBucketGroup", "what is reduced and gathered together"
    ),
    GROUP.wrapped("start_grad_sync", "starts the reduction of gradients"),
    GROUP.wrapped("finish_grad_sync", "waits for the reduction of gradients"),
    GROUP.wrapped("start_param_sync", "starts the all-gather of parameters"),
    GROUP.wrapped("finish_param_sync", "waits for the all-gather of parameters"),
    # --- making one
    OPTIMIZERS.wrapped(
        "get_megatron_optimizer(config, model_chunks, no_weight_decay_cond)",
        _BUILDS,
        until=15,
    ),
    OPTIMIZERS.wrapped(
        "get_megatron_optimizer(config, model_chunks, config_overrides, pg_collection)",
        _BUILDS,
        since=16,
    ),
    OPTIMIZERS.replaced(
        "_get_param_groups(model_chunks)", "the parameter groups, which are cut"
    ),
    OPTIMIZERS.wrapped("_get_megatron_optimizer_based_on_param_groups(config)", _BELOW),
    OPTIMIZERS.wrapped("_get_megatron_emerging_optimizer(config)", _BELOW, since=18),
    Place("megatron.core.optimizer.muon", since=16, until=17).wrapped(
        "get_megatron_muon_optimizer(config, model_chunks, "
        "layer_wise_distributed_optimizer, pg_collection)",
        "builds Megatron's own Muon",
    ),
    # --- classes of built optimizers, whose objects become ones of subclasses
    OPTIMIZERS.subclassed(
        "ChainedOptimizer", "the chain of dense and experts' optimizers"
    ),
    CHAIN.wrapped("step", "the whole step of AdamW or Muon"),
    DISTRIB.subclassed(
        "DistributedOptimizer", "shards main parameters and state over DP ranks"
    ),
    OPTIMIZERS.subclassed(
        "Adam", "the Adam that Megatron picked: TE's, Apex's or torch's"
    ),
    # --- states in fewer bytes
    CONFIG.wrapped("__post_init__", "wants AdamW for use_precision_aware_optimizer"),
    # --- states on the host
    CPU_OFFLOADING.subclassed("HybridDeviceOptimizer", "AdamW on the host, in parts"),
    HYBRID_OPTIMIZER.overridden(
        "_get_sub_optimizer_param_groups(offload_fraction)", "its shards"
    ),
    HYBRID_OPTIMIZER.overridden(
        "step", "updates shards, and copies them to the weights"
    ),
    HYBRID_OPTIMIZER.overridden("dummy_step", "makes state before a load"),
    HYBRID_OPTIMIZER.overridden(
        "_update_fp32_params_by_new_state", "called at the end of a load"
    ),
    HYBRID_OPTIMIZER.overridden("_init_sub_optimizers", "makes the parts anew"),
    # --- the norm of gradients and the step
    # The norm is a float or, where Megatron does not wait for it, a tensor; the same
    # on all ranks of the grad_stats_parallel_group.
    DIST.overridden("_copy_main_params_to_param_buffer", "mxfp8 parameters", since=14),
    CHAIN.overridden("get_grad_norm", "called on every rank before a part steps"),
    DIST.overridden("get_main_grads_for_grad_norm", _NORM, until=18, inherited=True),
    DIST.overridden(
        "get_grads_for_grad_norm(grad_norm_group)", _NORM, since=19, inherited=True
    ),
    DIST.overridden(
        "_unscale_main_grads_and_check_for_nan",
        "reduces the flag that skips a step",
        inherited=True,
    ),
    DIST.overridden("_collect_main_grad_data_for_unscaling", "what that flag is of"),
    CHAIN.overridden("prepare_grads", "called before each step; True if it is skipped"),
    CHAIN.overridden("step_with_ready_grads", "steps its parts one after another"),
    DIST.overridden("step_with_ready_grads", "steps, copies parameters"),
    DIST.overridden("_copy_model_params_to_main_params", "after a load of the model"),
    # --- the loss scale, which the plugin makes dense and experts' optimizers share
    Place("megatron.core.optimizer.grad_scaler", "DynamicGradScaler").overridden(
        "update(found_inf)", "is told if a step overflowed; moves the scale"
    ),
    # --- shards and buffers
    DDP.wrapped(
        "__init__(ddp_config, module, disable_bucketing)",
        "makes grad buffers",
        until=17,
    ),
    DDP.wrapped(
        "__init__(ddp_config, module, disable_bucketing, full_param_layout)",
        "takes a layout",
        since=18,
    ),
    # --- a parameter's state, through which every format goes
    DIST.overridden("_get_main_param_and_optimizer_states(model_param)", "its tensors"),
    DIST.overridden(
        "_set_main_param_and_optimizer_states(model_param, tensors)", "the same"
    ),
    # --- state of no single parameter
    DIST.overridden(
        "state_dict", "groups and loss scaler; adds the record of settings"
    ),
    DIST.overridden("load_state_dict(state_dict)", "the same back; checks the record"),
    DIST.overridden(
        "sharded_state_dict(model_sharded_state_dict, is_loading)",
        "calls the method of metadata's format",
    ),
    # --- torch and dp_zero_gather_scatter
    DIST.overridden(
        "get_parameter_state_dp_zero", "gathers each grad buffer to the first rank"
    ),
    DIST.overridden(
        "load_parameter_state_from_dp_zero(state_dict, update_legacy_format)",
        "scatters the same",
    ),
    DIST.overridden(
        "sharded_param_state_dp_zero(model_sharded_state_dict, is_loading)",
        "dp_zero_gather_scatter",
    ),
    # --- the formats of 0.15 and later
    DIST.overridden(
        "sharded_param_state_dp_reshardable(model_sharded_state_dict, is_loading)",
        "entries for each bucket",
        since=15,
    ),
    DIST.overridden(
        "load_parameter_state_from_dp_reshardable(state_dict)",
        "the same back",
        since=15,
    ),
    DIST.overridden(
        "sharded_param_state_fully_reshardable(model_sharded_state_dict, is_loading)",
        "by parameter's number",
        since=15,
    ),
    # --- the formats up to 0.14, which later ones still read
    DIST.overridden(
        "sharded_param_state_fs_model_space(model_sharded_state_dict, is_loading)",
        "by parameter's number",
    ),
    DIST.overridden(
        "sharded_param_state_fs_bucket_space(model_sharded_state_dict, is_loading)",
        "refused",
        until=14,
    ),
    # --- the chain
    CHAIN.overridden(
        "state_dict", "state dicts of its optimizers, numbered if there are several"
    ),
    CHAIN.overridden("load_state_dict(state_dict)", "the same back"),
    CHAIN.overridden(
        "sharded_state_dict(model_sharded_state_dict, is_loading)",
        "the same for torch_dist",
    ),
    CHAIN.overridden(
        "save_parameter_state(filename)", "torch: one file for all optimizers"
    ),
    CHAIN.overridden(
        "load_parameter_state(filename, update_legacy_format)", "reads that file"
    ),
    # --- dist_checkpointing
    CKPT.wrapped(
        "save(sharded_state_dict, checkpoint_dir)",
        "writes torch_dist, or returns an AsyncRequest",
    ),
    CKPT.wrapped(
        "load(sharded_state_dict, checkpoint_dir)", "reads torch_dist on every rank"
    ),
    CKPT.replaced("load_content_metadata", "the format of a checkpoint", since=14),
)
