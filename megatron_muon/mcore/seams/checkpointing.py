"""Megatron's symbols that saving and loading use: a run would miss one only at its first save."""

from megatron_muon.mcore.seams.row import Place

_DIST = Place("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer")
_DIST15 = Place(_DIST.module, _DIST.owner, since=(0, 15))
_CHAIN = Place("megatron.core.optimizer", "ChainedOptimizer")
_CKPT = Place("megatron.core.dist_checkpointing")
_ASYNC = Place("megatron.core.dist_checkpointing.strategies.async_utils")
_MAPPING = Place("megatron.core.dist_checkpointing.mapping")
_SERIALIZATION = Place("megatron.core.dist_checkpointing.serialization")
_SHARDED = "model_sharded_state_dict is_loading"
_FILE = "sharded_state_dict checkpoint_dir"
_LOADED = "state_dict update_legacy_format"
ROWS = (
    # --- a parameter's state, through which every format goes
    _DIST.overridden("_get_main_param_and_optimizer_states", "its tensors", "model_param"),
    _DIST.overridden("_set_main_param_and_optimizer_states", "the same", "model_param tensors"),
    _DIST.called("_get_model_param_range_map", "param: this rank's slice of it", "param"),
    # --- state of no single parameter
    _DIST.overridden("state_dict", "groups and loss scaler; adds the record of settings"),
    _DIST.overridden("load_state_dict", "the same back; checks the record", "state_dict"),
    _DIST.overridden("sharded_state_dict", "calls the method of metadata's format", _SHARDED),
    # --- torch and dp_zero_gather_scatter
    _DIST.overridden("get_parameter_state_dp_zero", "gathers each grad buffer to the first rank"),
    _DIST.overridden("load_parameter_state_from_dp_zero", "scatters the same", _LOADED),
    _DIST.overridden("sharded_param_state_dp_zero", "dp_zero_gather_scatter", _SHARDED),
    # --- the formats of 0.15 and later
    _DIST15.overridden("sharded_param_state_dp_reshardable", "entries for each bucket", _SHARDED),
    _DIST15.overridden("load_parameter_state_from_dp_reshardable", "the same back", "state_dict"),
    _DIST15.overridden("sharded_param_state_fully_reshardable", "by parameter's number", _SHARDED),
    _DIST15.overridden("load_parameter_state_from_fully_reshardable", "the same", "state_dict"),
    # --- the formats up to 0.14, which later ones still read
    _DIST.overridden("sharded_param_state_fs_model_space", "by parameter's number", _SHARDED),
    _DIST.overridden("load_parameter_state_from_fs_model_space", "the same back", "state_dict"),
    _DIST.overridden(
        "sharded_param_state_fs_bucket_space", "overridden to refuse it", _SHARDED, until=(0, 14)
    ),
    Place(_DIST.module).read(
        "param_group_identifier_keys", "keys by which a load pairs groups", since=(0, 14)
    ),
    # --- the chain
    _CHAIN.overridden("state_dict", "state dicts of its optimizers, numbered if there are several"),
    _CHAIN.overridden("load_state_dict", "the same back", "state_dict"),
    _CHAIN.overridden("sharded_state_dict", "the same for torch_dist", _SHARDED),
    _CHAIN.overridden("save_parameter_state", "torch: one file for all optimizers", "filename"),
    _CHAIN.overridden("load_parameter_state", "reads that file", "filename update_legacy_format"),
    _CHAIN.overridden("_synchronize_steps", "gives every group the same step", since=(0, 14)),
    # --- dist_checkpointing
    _CKPT.wrapped("save", "writes torch_dist, or returns an AsyncRequest", _FILE),
    _CKPT.wrapped("load", "reads torch_dist on every rank", _FILE),
    _CKPT.replaced(
        "load_content_metadata", "the format; another for Megatron's own Muon", since=(0, 14)
    ),
    _MAPPING.read(
        "ShardedTensor",
        "a rank's part of a tensor on disk, copied to have another key",
        "key data dtype global_shape global_offset",
    ),
    _ASYNC.read("AsyncRequest", "calls finalize_fns in order after it", "async_fn finalize_fns"),
    _SERIALIZATION.read("logger", "silenced where the digest's mark is the only file"),
)
