"""Megatron's symbols that saving and loading use.

Each has a row, since a run would otherwise miss one only at its first save.
"""

from __future__ import annotations

from megatron_muon.mcore.seams.row import NEWEST, OLDEST, Seam, Use, Version

_RESHARDABLE: Version = (0, 15)  # the first with dp_reshardable and fully_reshardable
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_CHAIN = "megatron.core.optimizer"
_CHECKPOINTING = "megatron.core.dist_checkpointing"


def _distributed(
    name: str,
    use: Use,
    parameters: tuple[str, ...],
    relied_on: str,
    since: Version = OLDEST,
    until: Version = NEWEST,
) -> Seam:
    name = f"DistributedOptimizer.{name}"
    return Seam(_OPTIMIZER, name, use, relied_on, parameters, since, until)


def _chained(
    name: str, use: Use, parameters: tuple[str, ...], relied_on: str, since: Version = OLDEST
) -> Seam:
    return Seam(_CHAIN, f"ChainedOptimizer.{name}", use, relied_on, parameters, since)


_SHARDED = ("model_sharded_state_dict", "is_loading")
SEAMS = (
    # --- a parameter's state, through which every format goes
    _distributed(
        "_get_main_param_and_optimizer_states",
        "overridden",
        ("model_param",),
        "gives a format a parameter's state: a dict with param and the optimizer's tensors; "
        "overridden to know Muon's momentum",
    ),
    _distributed(
        "_set_main_param_and_optimizer_states",
        "overridden",
        ("model_param", "tensors"),
        "takes a parameter's state from a format; overridden likewise",
    ),
    _distributed(
        "_get_model_param_range_map",
        "called",
        ("param",),
        "under the key param, start and end of this rank's piece in the parameter",
    ),
    # --- state of no single parameter
    _distributed(
        "state_dict",
        "overridden",
        (),
        "parameter groups and loss scaler; overridden to add the record of settings",
    ),
    _distributed(
        "load_state_dict", "overridden", ("state_dict",), "the same back; overridden to check it"
    ),
    _distributed(
        "sharded_state_dict",
        "overridden",
        _SHARDED,
        "calls the method of the format that metadata (or up to 0.12 sharding_type) asks for",
    ),
    # --- torch and dp_zero_gather_scatter
    _distributed(
        "get_parameter_state_dp_zero",
        "overridden",
        (),
        "gathers each grad buffer to the first rank: param, exp_avg and exp_avg_sq, flat; "
        "overridden to write Muon's by name",
    ),
    _distributed(
        "load_parameter_state_from_dp_zero",
        "overridden",
        ("state_dict", "update_legacy_format"),
        "scatters the same; overridden likewise",
    ),
    _distributed(
        "sharded_param_state_dp_zero", "overridden", _SHARDED, "dp_zero_gather_scatter; overridden"
    ),
    # --- the formats of 0.15 and later
    _distributed(
        "sharded_param_state_dp_reshardable",
        "overridden",
        _SHARDED,
        "a list of entries for each bucket, in the order of gbuf_ranges, with param and padding; "
        "overridden to have a tensor for each parameter",
        _RESHARDABLE,
    ),
    _distributed(
        "load_parameter_state_from_dp_reshardable",
        "overridden",
        ("state_dict",),
        "the same back, where per_bucket_numel_unpadded is equal; overridden likewise",
        _RESHARDABLE,
    ),
    _distributed(
        "sharded_param_state_fully_reshardable",
        "overridden",
        _SHARDED,
        "what get_parameter_state_dp_zero gathers, as a dict by number of parameter; overridden to "
        "cut it at the right places",
        _RESHARDABLE,
    ),
    _distributed(
        "load_parameter_state_from_fully_reshardable",
        "overridden",
        ("state_dict",),
        "the same back; overridden to ask for Muon's names",
        _RESHARDABLE,
    ),
    # --- the formats up to 0.14, which later ones still read
    _distributed(
        "sharded_param_state_fs_model_space",
        "overridden",
        _SHARDED,
        "fully_sharded_model_space: a dict by number of parameter, with fp32_param; overridden",
    ),
    _distributed(
        "load_parameter_state_from_fs_model_space",
        "overridden",
        ("state_dict",),
        "the same back; overridden to ask for Muon's names",
    ),
    _distributed(
        "sharded_param_state_fs_bucket_space",
        "overridden",
        _SHARDED,
        "fully_sharded_bucket_space; overridden to refuse it",
        (0, 12),
        (0, 14),
    ),
    Seam(
        _OPTIMIZER,
        "param_group_identifier_keys",
        "read",
        "the keys by which load_state_dict pairs parameter groups",
        since=(0, 14),
    ),
    # --- the chain
    _chained(
        "state_dict",
        "overridden",
        (),
        "state dicts of the optimizers in it, numbered where there are several",
    ),
    _chained("load_state_dict", "overridden", ("state_dict",), "the same back"),
    _chained("sharded_state_dict", "overridden", _SHARDED, "the same for torch_dist"),
    _chained(
        "save_parameter_state",
        "overridden",
        ("filename",),
        "format torch: one file for all optimizers",
    ),
    _chained(
        "load_parameter_state",
        "overridden",
        ("filename", "update_legacy_format"),
        "format torch: reads that file",
    ),
    _chained(
        "_synchronize_steps",
        "overridden",
        (),
        "gives every parameter group the same step; overridden where AdamW goes on after Muon",
        (0, 14),
    ),
    # --- dist_checkpointing
    Seam(
        _CHECKPOINTING,
        "load_content_metadata",
        "replaced",
        "the format of a checkpoint; replaced while one of Megatron's own Muon is read",
        since=(0, 14),
    ),
    Seam(
        f"{_CHECKPOINTING}.mapping",
        "ShardedTensor",
        "read",
        "a rank's part of a tensor on disk: a dataclass, copied to have another key",
        ("key", "data", "dtype", "global_shape", "global_offset"),
    ),
    Seam(
        f"{_CHECKPOINTING}.strategies.async_utils",
        "AsyncRequest",
        "read",
        "an asynchronous save, with functions that are called in order after it has written",
        ("async_fn", "finalize_fns"),
    ),
    Seam(
        _CHECKPOINTING,
        "save",
        "wrapped",
        "writes a torch_dist checkpoint, or returns an AsyncRequest whose finalize_fns are called "
        "in order on every rank; wrapped to make the digest",
        ("sharded_state_dict", "checkpoint_dir"),
    ),
    Seam(
        _CHECKPOINTING,
        "load",
        "wrapped",
        "reads a torch_dist checkpoint on every rank; wrapped to check the digest",
        ("sharded_state_dict", "checkpoint_dir"),
    ),
    Seam(
        f"{_CHECKPOINTING}.serialization",
        "logger",
        "read",
        "warns of files in the folder; silenced where the digest's mark is the only file",
    ),
    Seam(
        f"{_CHECKPOINTING}.strategies.filesystem_async",
        "HAVE_PSUTIL",
        "read",
        "whether there is psutil, without which the processes that write hang",
        since=(0, 14),
    ),
)
