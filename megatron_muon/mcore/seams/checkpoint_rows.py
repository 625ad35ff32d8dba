"""What saving and loading rely on in Megatron: rows of the table in ``rows``.

A name that is missing here is found at a run's first save, so each has a row.
"""

from __future__ import annotations

from megatron_muon.mcore.seams.row import NEWEST, OLDEST, Attribute, Hook, Version

_RESHARDABLE: Version = (0, 15)  # the first with dp_reshardable and fully_reshardable
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_CHAIN = "megatron.core.optimizer"
_CHECKPOINTING = "megatron.core.dist_checkpointing"
_STATE = "megatron.core.parallel_state"
_TRAINING = "megatron.training.checkpointing"
_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"


def _distributed(
    name: str,
    parameters: tuple[str, ...],
    relied_on: str,
    since: Version = OLDEST,
    until: Version = NEWEST,
) -> Hook:
    return Hook(_OPTIMIZER, f"DistributedOptimizer.{name}", parameters, relied_on, since, until)


def _chained(
    name: str, parameters: tuple[str, ...], relied_on: str, since: Version = OLDEST
) -> Hook:
    return Hook(_CHAIN, f"ChainedOptimizer.{name}", parameters, relied_on, since)


_SHARDED = ("model_sharded_state_dict", "is_loading")
CHECKPOINT_HOOKS = (
    # --- a parameter's state, through which every format goes
    _distributed(
        "_get_main_param_and_optimizer_states",
        ("model_param",),
        "what a format takes of a parameter: a dict with param and the optimizer's tensors; "
        "overridden to know Muon's momentum",
    ),
    _distributed(
        "_set_main_param_and_optimizer_states",
        ("model_param", "tensors"),
        "what a format gives back to a parameter; overridden likewise",
    ),
    _distributed(
        "_get_model_param_range_map",
        ("param",),
        "a parameter's range in itself, under param: start and end of this rank's piece",
    ),
    # --- all that is not a parameter's
    _distributed("state_dict", (), "groups and scaler; overridden to add the record of settings"),
    _distributed("load_state_dict", ("state_dict",), "the same back; overridden to check it"),
    _distributed(
        "sharded_state_dict",
        _SHARDED,
        "calls the method of the format that metadata (or up to 0.12 sharding_type) asks for",
    ),
    # --- torch and dp_zero_gather_scatter
    _distributed(
        "get_parameter_state_dp_zero",
        (),
        "gathers each grad buffer to the first rank: param, exp_avg and exp_avg_sq, flat; "
        "overridden to write Muon's by name",
    ),
    _distributed(
        "load_parameter_state_from_dp_zero",
        ("state_dict", "update_legacy_format"),
        "scatters the same; overridden likewise",
    ),
    _distributed("sharded_param_state_dp_zero", _SHARDED, "dp_zero_gather_scatter; overridden"),
    # --- the formats of 0.15 and later
    _distributed(
        "sharded_param_state_dp_reshardable",
        _SHARDED,
        "a list of entries for each bucket, in the order of gbuf_ranges, with param and padding; "
        "overridden to have a tensor for each parameter",
        _RESHARDABLE,
    ),
    _distributed(
        "load_parameter_state_from_dp_reshardable",
        ("state_dict",),
        "the same back, where per_bucket_numel_unpadded is equal; overridden likewise",
        _RESHARDABLE,
    ),
    _distributed(
        "sharded_param_state_fully_reshardable",
        _SHARDED,
        "a dict by number of parameter, of what get_parameter_state_dp_zero gathers; overridden to "
        "cut it at the right places",
        _RESHARDABLE,
    ),
    _distributed(
        "load_parameter_state_from_fully_reshardable",
        ("state_dict",),
        "the same back; overridden to ask for Muon's names",
        _RESHARDABLE,
    ),
    # --- the formats up to 0.14, which later ones still read
    _distributed(
        "sharded_param_state_fs_model_space",
        _SHARDED,
        "fully_sharded_model_space: a dict by number of parameter, with fp32_param; overridden",
    ),
    _distributed(
        "load_parameter_state_from_fs_model_space",
        ("state_dict",),
        "the same back; overridden to ask for Muon's names",
    ),
    _distributed(
        "sharded_param_state_fs_bucket_space",
        _SHARDED,
        "fully_sharded_bucket_space; overridden to refuse it",
        (0, 12),
        (0, 14),
    ),
    Hook(
        _OPTIMIZER,
        "param_group_identifier_keys",
        (),
        "the keys by which load_state_dict pairs parameter groups",
        (0, 14),
    ),
    # --- the chain
    _chained("state_dict", (), "those of the optimizers in it, numbered where there are several"),
    _chained("load_state_dict", ("state_dict",), "the same back"),
    _chained("sharded_state_dict", _SHARDED, "those of the optimizers in it"),
    _chained("save_parameter_state", ("filename",), "format torch: one file for all optimizers"),
    _chained("load_parameter_state", ("filename", "update_legacy_format"), "format torch: it back"),
    _chained(
        "_synchronize_steps",
        (),
        "gives every parameter group one step; overridden where AdamW goes on after Muon",
        (0, 14),
    ),
    # --- dist_checkpointing
    Hook(
        _CHECKPOINTING,
        "load_common_state_dict",
        ("checkpoint_dir",),
        "reads what is the same on all ranks: whose optimizer state a checkpoint has",
    ),
    Hook(
        _CHECKPOINTING,
        "load_content_metadata",
        (),
        "the format of a checkpoint; replaced while one of Megatron's own Muon is read",
        (0, 14),
    ),
    Hook(
        f"{_CHECKPOINTING}.mapping",
        "ShardedTensor",
        ("key", "data", "dtype", "global_shape", "global_offset"),
        "a rank's part of a tensor on disk: a dataclass, whose copies get other keys",
    ),
    Hook(
        f"{_CHECKPOINTING}.strategies.async_utils",
        "AsyncRequest",
        ("async_fn", "finalize_fns"),
        "an asynchronous save, with functions that are called in order once it is written",
    ),
    # --- who has which part
    Hook(
        "megatron.core.utils",
        "get_model_config",
        ("model",),
        "the TransformerConfig of a model that may be wrapped",
    ),
    Hook(_STATE, "get_pipeline_model_parallel_rank", (), "the number of the pipeline stage"),
    Hook(_STATE, "get_expert_model_parallel_rank", (), "which experts this rank has"),
    Hook(
        _STATE, "get_expert_model_parallel_world_size", (), "how many ranks share a layer's experts"
    ),
    # --- Megatron-LM's
    Hook(
        _TRAINING,
        "get_checkpoint_name",
        ("checkpoints_path", "iteration", "release", "return_base_dir"),
        "a checkpoint's folder",
    ),
    Hook(_TRAINING, "checkpoint_exists", ("checkpoints_path",), "whether there is a tracker"),
    Hook(
        _TRAINING,
        "read_metadata",
        ("tracker_filename",),
        "the iteration that a tracker names; replaced where --ckpt-step names another",
    ),
    Hook(_TRAINING, "_NON_PERSISTENT_CKPT_SUBDIR", (), "where non-persistent checkpoints are"),
    Hook(
        _TRAINING,
        "open_file",
        (),
        "opens the tracker for writing; replaced to write it whole or not at all",
        (0, 15),
        (0, 18),
    ),
    Hook(_TRAINING, "maybe_msc", (), "its open() does so; replaced likewise", (0, 19)),
    Hook("megatron.training", "get_args", (), "the arguments of the run"),
    Hook("megatron.training", "get_tokenizer", (), "the number of tokens before padding"),
)


def _of_optimizer(name: str, relied_on: str, *, of_stubs: bool = False) -> Attribute:
    return Attribute(_OPTIMIZER, "DistributedOptimizer", name, relied_on, of_stubs)


def _of_buffer(name: str, relied_on: str) -> Attribute:
    return Attribute(_BUFFERS, "_ParamAndGradBuffer", name, relied_on)


def _of_bucket(name: str, relied_on: str) -> Attribute:
    return Attribute(_BUFFERS, "_ParamAndGradBucket", name, relied_on)


def _of_ddp(name: str, relied_on: str) -> Attribute:
    return Attribute("megatron.core.distributed", "DistributedDataParallel", name, relied_on)


ATTRIBUTES = (
    _of_optimizer(
        "model_chunks", "the DDP-wrapped modules, for names and marks of parameters", of_stubs=True
    ),
    _of_optimizer(
        "is_stub_optimizer",
        "True on a rank that has no parameter groups and never steps",
        of_stubs=True,
    ),
    _of_optimizer("config", "its timers, and what the run asks for", of_stubs=True),
    _of_optimizer(
        "grad_scaler",
        "None, or the loss scaler, which dense and experts' optimizers come to share",
        of_stubs=True,
    ),
    _of_optimizer(
        "distributed_optimizer_instance_id",
        "which of several instances this rank is in",
        of_stubs=True,
    ),
    _of_optimizer(
        "optimizer", "the inner Adam: its param_groups hold flat shards, its state is ours to fill"
    ),
    _of_optimizer(
        "init_state_fn", "called with the inner optimizer to fill its state before a load"
    ),
    _of_optimizer("data_parallel_group", "the ranks that each bucket is cut over"),
    _of_optimizer("data_parallel_group_idx", "the model-parallel rank, in keys of dp_reshardable"),
    _of_optimizer("ddp_config", "num_distributed_optimizer_instances"),
    _of_optimizer(
        "buffers", "each with param_index_map (start, stop, bucket) and buckets (offset, grad_data)"
    ),
    _of_optimizer(
        "gbuf_ranges", "by buffer, dtypes and bucket: param_map, the pieces that this rank has"
    ),
    _of_optimizer("per_bucket_numel_unpadded", "what dp_reshardable compares before a load"),
    _of_optimizer("model_param_group_index_map", "the parameter group of a model parameter"),
    _of_optimizer("model_float16_groups", "parameters in step with shard_fp32_from_float16_groups"),
    _of_optimizer("shard_fp32_from_float16_groups", "their flat fp32 main parameters"),
    _of_optimizer("model_fp32_groups", "parameters in step with shard_fp32_groups"),
    _of_optimizer("shard_fp32_groups", "flat views of them"),
    Attribute(_CHAIN, "ChainedOptimizer", "chained_optimizers", "the optimizers in it"),
    _of_buffer("param_index_map", "(start, stop, bucket) of each parameter"),
    _of_buffer("buckets", "in the order of their elements"),
    _of_buffer("numel_unpadded", "elements of the tensors that are gathered of it"),
    _of_bucket("grad_data", "all of the bucket's elements, padding too"),
    _of_bucket("offset", "where the bucket begins in its buffer"),
    _of_bucket("numel_unpadded", "elements of the bucket without padding"),
    _of_ddp("buffers", "the grad buffers of dense weights"),
    _of_ddp("expert_parallel_buffers", "those of experts' weights"),
    _of_ddp("ddp_config", "whether the distributed optimizer is on, and how many instances"),
)

# Of a parameter group, which NeMo writes with a prefix, pre_.
GROUP_KEYS = {
    "is_expert_parallel": "whether its parameters are experts'",
    "is_decoupled_lr": "what groups are paired by at a load",
    "lr_mult": "what groups are paired by at a load",
    "wd_mult": "what groups are paired by at a load",
}
# Of Megatron-LM's arguments, once they are checked.
ARGUMENTS = {
    "save": "the folder to save into",
    "load": "the folder to load from",
    "use_dist_ckpt": "whether dist_checkpointing writes, or torch.save",
    "non_persistent_ckpt_type": "whether there are checkpoints beside, and of which kind",
    "non_persistent_global_ckpt_dir": "where those are",
    "finetune": "whether the optimizer's state is loaded",
    "no_load_optim": "whether the optimizer's state is loaded",
    "override_opt_param_scheduler": "whether the run's own rates hold after a load",
    "ddp_num_buckets": "how many buckets the grad buffers have",
    "ddp_bucket_size": "how large they are",
}
