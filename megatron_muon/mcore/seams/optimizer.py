"""Megatron's optimizers that the plugin uses, and the wrapper whose buffers they shard."""

from __future__ import annotations

from megatron_muon.mcore.seams.row import NEWEST, OLDEST, Attribute, Seam, Use, Version

_CHAIN = "megatron.core.optimizer"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_SCALER = "megatron.core.optimizer.grad_scaler"
_LAYOUT = "megatron.core.optimizer.param_layout"
_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
_LAYOUTS: Version = (0, 18)  # the first version that takes a layout of its grad buffers


def _distributed(
    name: str,
    use: Use,
    relied_on: str,
    parameters: tuple[str, ...] = ("self",),
    since: Version = OLDEST,
    until: Version = NEWEST,
    inherited: bool = False,
) -> Seam:
    name = f"DistributedOptimizer.{name}"
    return Seam(_OPTIMIZER, name, use, relied_on, parameters, since, until, inherited)


def _chained(name: str, use: Use, relied_on: str) -> Seam:
    return Seam(_CHAIN, f"ChainedOptimizer.{name}", use, relied_on, ("self",))


def _bucket_group(name: str, relied_on: str) -> tuple[Seam, Seam]:
    name = f"_ParamAndGradBucketGroup.{name}"
    named = f"{relied_on}; overridden to name it in the error where a peer is lost"
    marked = f"{relied_on}; replaced in a step that is traced, to mark it there"
    return (
        Seam(_BUFFERS, name, "overridden", named, ("self",)),
        Seam(_BUFFERS, name, "replaced", marked, ("self",), part="traces"),
    )


def _scaler(name: str, parameters: tuple[str, ...], relied_on: str) -> Seam:
    return Seam(_SCALER, name, "called", relied_on, parameters)


SEAMS = (
    # --- communication that errors name and traces mark
    Seam(
        _BUFFERS,
        "_ParamAndGradBucketGroup",
        "subclassed",
        "buckets that are reduced and gathered together; a built one's class becomes a subclass",
    ),
    Seam(
        _BUFFERS,
        "_ParamAndGradBucketGroup.check_grads",
        "read",
        "the frame from which start_grad_sync raises for gradients that are not finite",
    ),
    *_bucket_group("start_grad_sync", "starts the reduction of gradients"),
    *_bucket_group("finish_grad_sync", "waits for the reduction of gradients"),
    *_bucket_group("start_param_sync", "starts the all-gather of parameters"),
    *_bucket_group("finish_param_sync", "waits for the all-gather of parameters"),
    # --- making one
    Seam(
        _CHAIN,
        "get_megatron_optimizer",
        "wrapped",
        "builds a ChainedOptimizer of DistributedOptimizers around Adam; wrapped to make those "
        "Muon's. no_weight_decay_cond says which weights are not decayed",
        ("config", "model_chunks", "no_weight_decay_cond"),
        until=(0, 15),
    ),
    Seam(
        _CHAIN,
        "get_megatron_optimizer",
        "wrapped",
        "builds a ChainedOptimizer of DistributedOptimizers around Adam; wrapped to make those "
        "Muon's. config_overrides holds wd_mult = 0 for weights that are not decayed",
        ("config", "model_chunks", "config_overrides", "pg_collection"),
        since=(0, 16),
    ),
    Seam(
        _CHAIN,
        "_get_param_groups",
        "replaced",
        "makes the parameter groups; replaced for a run whose rates or decays are multiplied, to "
        "cut them further",
        ("model_chunks",),
    ),
    Seam(
        _CHAIN,
        "get_standard_config_overrides",
        "called",
        "the overrides that Megatron uses where it is given none",
        ("config",),
        since=(0, 16),
    ),
    Seam(
        _CHAIN,
        "_get_megatron_optimizer_based_on_param_groups",
        "wrapped",
        "called by a get_megatron_optimizer that was taken before install(): stopped there",
        ("config",),
    ),
    Seam(
        _CHAIN,
        "_get_megatron_emerging_optimizer",
        "wrapped",
        "called by such a function for the name muon, Megatron's own Muon: stopped there",
        ("config",),
        since=(0, 18),
    ),
    Seam(
        "megatron.core.optimizer.muon",
        "get_megatron_muon_optimizer",
        "wrapped",
        "builds Megatron's own Muon, which callers in these cores take for the name muon; wrapped "
        "to build the plugin's",
        ("config", "model_chunks", "layer_wise_distributed_optimizer", "pg_collection"),
        since=(0, 16),
        until=(0, 17),
    ),
    # --- the classes that built optimizers are turned into subclasses of
    Seam(
        _CHAIN,
        "ChainedOptimizer",
        "subclassed",
        "the chain of dense and experts' optimizers; a built one's class becomes a subclass",
    ),
    Seam(
        _OPTIMIZER,
        "DistributedOptimizer",
        "subclassed",
        "shards main parameters and state over DP ranks; a built one's class becomes a subclass",
    ),
    Seam(
        _CHAIN,
        "Adam",
        "subclassed",
        "the Adam that Megatron picked (TE's, Apex's or torch's); a built one's class becomes a "
        "subclass",
    ),
    # --- the norm of gradients and the step
    _chained(
        "get_grad_norm",
        "overridden",
        "called on every rank once gradients are reduced and copied to the shards of each of its "
        "chained_optimizers, before one of them steps; a float or, where Megatron does not wait "
        "for it, a tensor, the same on all ranks of the grad_stats_parallel_group",
    ),
    _distributed(
        "get_main_grads_for_grad_norm",
        "overridden",
        "the gradients that the norm counts; of replicas it counts one",
        until=(0, 18),
        inherited=True,
    ),
    _distributed(
        "get_grads_for_grad_norm",
        "overridden",
        "the same; with a group, the gradients of parameters clipped by a norm of their own",
        ("self", "grad_norm_group"),
        since=(0, 19),
        inherited=True,
    ),
    _distributed(
        "_unscale_main_grads_and_check_for_nan",
        "overridden",
        "with a loss scale, reduces the flag that skips a step; overridden to name that in the "
        "error where a peer is lost",
        inherited=True,
    ),
    _chained(
        "grads_states_parallel_group_is_shared",
        "called",
        "whether all of its chained_optimizers share one norm",
    ),
    _chained(
        "prepare_grads",
        "overridden",
        "called on every rank before each step; True where the step is skipped",
    ),
    _chained(
        "step_with_ready_grads",
        "overridden",
        "called on every rank once gradients are prepared and clipped; steps its "
        "chained_optimizers one after another",
    ),
    _distributed(
        "step_with_ready_grads",
        "overridden",
        "called on every rank once gradients are prepared and clipped; calls the inner optimizer's "
        "step, copies main to model parameters and starts the all-gather",
    ),
    _distributed(
        "_copy_main_params_to_model_params",
        "overridden",
        "copies shards into the buckets, pair by pair of its lists; overridden, with "
        "early_param_gather (--muon-early-param-gather), to pass over what is gathered already",
    ),
    _distributed(
        "_copy_model_params_to_main_params",
        "overridden",
        "called after a load of the model alone; overridden to have its parameters gathered again",
    ),
    _distributed(
        "get_grad_stats_parallel_group",
        "called",
        "the ranks that skip or take a step together: all stages of one optimizer instance",
    ),
    _distributed(
        "get_parameters",
        "called",
        "the flat fp32 shards that the inner optimizer updates",
        inherited=True,
    ),
    # --- the loss scale, which the plugin makes dense and experts' optimizers share
    _scaler("DynamicGradScaler", (), "the loss scaler of a run in fp16, behind a stand-in"),
    _scaler("MegatronGradScaler.scale", (), "the factor of the loss, (1,) fp32"),
    _scaler("MegatronGradScaler.inv_scale", (), "the factor of gradients, which undoes it"),
    _scaler("DynamicGradScaler.update", ("self", "found_inf"), "is told if a step overflowed"),
    _scaler("DynamicGradScaler.state_dict", ("self",), "its saved state"),
    _scaler("DynamicGradScaler.load_state_dict", ("self", "state_dict"), "the same back"),
    # --- shards and buffers
    _distributed(
        "_build_model_gbuf_range",
        "called",
        "cuts each bucket into equal shards, one per DP rank, as layout.Parameter.shards does",
        ("param_and_grad_buffer", "bucket_index"),
    ),
    _distributed(
        "_compute_per_buffer_param_layout",
        "wrapped",
        "lays out a grad buffer before its model is wrapped; wrapped, with align_shards "
        "(--muon-dp-layout), to order the parameters of each bucket",
        ("params", "bucket_size", "data_parallel_world_size", "ddp_config", "param_indices"),
        since=_LAYOUTS,
    ),
    Seam(
        "megatron.core.distributed",
        "DistributedDataParallel",
        "read",
        "the one wrapper of model chunks whose buffers Muon shards over",
    ),
    Seam(
        "megatron.core.distributed",
        "DistributedDataParallel.__init__",
        "wrapped",
        "takes the layouts or makes them; wrapped, with align_shards (--muon-dp-layout), to order "
        "them by its model",
        ("module", "pg_collection", "full_param_layout"),
        since=_LAYOUTS,
    ),
)


def _of_optimizer(name: str, relied_on: str, *, of_stubs: bool = False) -> Attribute:
    return Attribute(_OPTIMIZER, "DistributedOptimizer", name, relied_on, of_stubs)


def _of_buffer(name: str, relied_on: str) -> Attribute:
    return Attribute(_BUFFERS, "_ParamAndGradBuffer", name, relied_on)


def _of_bucket(name: str, relied_on: str) -> Attribute:
    return Attribute(_BUFFERS, "_ParamAndGradBucket", name, relied_on)


def _of_bucket_group(name: str, relied_on: str) -> Attribute:
    return Attribute(_BUFFERS, "_ParamAndGradBucketGroup", name, relied_on)


def _of_ddp(name: str, relied_on: str) -> Attribute:
    return Attribute("megatron.core.distributed", "DistributedDataParallel", name, relied_on)


def _of_layout(owner: str, name: str, relied_on: str) -> Attribute:
    return Attribute(_LAYOUT, owner, name, relied_on, since=_LAYOUTS)


ATTRIBUTES = (
    _of_optimizer(
        "model_chunks", "the DDP-wrapped modules, for names and marks of parameters", of_stubs=True
    ),
    _of_optimizer(
        "is_stub_optimizer",
        "True on a rank that has no parameter groups and never steps",
        of_stubs=True,
    ),
    _of_optimizer("config", "its timers, and the run's settings", of_stubs=True),
    _of_optimizer(
        "grad_scaler",
        "None, or the loss scaler, which dense and experts' optimizers are made to share",
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
    _of_optimizer("per_bucket_numel_unpadded", "sizes that dp_reshardable compares at a load"),
    _of_optimizer("model_param_group_index_map", "the parameter group of a model parameter"),
    _of_optimizer("model_float16_groups", "parameters in step with shard_fp32_from_float16_groups"),
    _of_optimizer("shard_fp32_from_float16_groups", "their flat fp32 main parameters"),
    _of_optimizer("model_fp32_groups", "parameters in step with shard_fp32_groups"),
    _of_optimizer("shard_fp32_groups", "flat views of them"),
    Attribute(_CHAIN, "ChainedOptimizer", "chained_optimizers", "the optimizers in it"),
    Attribute(_CHAIN, "ChainedOptimizer", "config", "the run's settings"),
    _of_buffer("param_index_map", "(start, stop, bucket) of each parameter"),
    _of_buffer("buckets", "in the order of their elements"),
    _of_buffer("numel_unpadded", "elements of the tensors that Megatron gathers from it"),
    _of_bucket("grad_data", "all of the bucket's elements, padding too"),
    _of_bucket("offset", "where the bucket begins in its buffer"),
    _of_bucket("numel_unpadded", "elements of the bucket without padding"),
    _of_bucket("param_data", "all of the bucket's parameters, flat, as they are gathered"),
    _of_bucket_group("buckets", "what it reduces and gathers together"),
    _of_bucket_group("param_gather_handle", "None, or the all-gather that is under way"),
    _of_bucket_group("param_gather_dispatched", "whether a forward pass still has to start one"),
    _of_bucket_group(
        "next_param_gather_bucket_group", "the one that a forward pass starts after it"
    ),
    _of_bucket_group(
        "intra_distributed_optimizer_instance_group", "the ranks that reduce and gather its buckets"
    ),
    _of_ddp("bucket_groups", "those of dense weights, whose errors name the phase"),
    _of_ddp("expert_parallel_bucket_groups", "those of experts' weights"),
    _of_ddp("buffers", "the grad buffers of dense weights"),
    _of_ddp("expert_parallel_buffers", "the grad buffers of experts' weights"),
    _of_ddp("ddp_config", "whether the distributed optimizer and its overlaps are on"),
    _of_ddp("module", "the model inside"),
    # --- a layout of a grad buffer
    _of_layout("FullParamLayout", "layouts", "the layout of each grad buffer"),
    _of_layout("PerBufferParamLayout", "param_index_map", "(start, stop, bucket) of a parameter"),
    _of_layout("PerBufferParamLayout", "bucket_indices", "(start, stop) of each bucket"),
    _of_layout("PerBufferParamLayout", "per_bucket_numel_unpadded", "elements without padding"),
)

# Keys of a parameter group, which NeMo writes with a prefix, pre_. They are keys of a dict, so they
# can only be checked once an optimizer is built.
GROUP_KEYS = {
    "is_expert_parallel": "whether its parameters are experts'",
    "is_decoupled_lr": "pairs groups at a load",
    "lr_mult": "pairs groups at a load",
    "wd_mult": "pairs groups at a load",
}
