"""What only the benchmark uses of others' code: checked when it starts, and by
``doctor``.
"""

from megatron_muon.lab.dry_run.seams import STATE
from megatron_muon.mcore.seams.optimizer import BUFFERS, DDP
from megatron_muon.mcore.seams.row import Place, Row

_SANITIZER = Place("torch.cuda._sanitizer")
ROWS: tuple[Row, ...] = (
    STATE.called(
        "get_tensor_model_parallel_rank", "which part of a weight this rank has"
    ),
    STATE.called("get_data_parallel_rank", "which part of a batch this rank has"),
    STATE.called(
        "model_parallel_is_initialized", "whether its process groups are there"
    ),
    DDP.called("start_grad_sync", "starts the reduction of gradients"),
    DDP.called("finish_grad_sync", "waits for that reduction"),
    Place("torch.utils._python_dispatch").subclassed(
        "TorchDispatchMode", "sees every kernel"
    ),
    _SANITIZER.called(
        "enable_cuda_sanitizer", "raises an error where streams race, from then on"
    ),
    _SANITIZER.read("CUDASanitizerErrors", "that error"),
    *Place(BUFFERS.module, "_ParamAndGradBuffer").has(
        grad_data="all gradients of a buffer, whose memory is freed between rows",
        param_data="all parameters of a buffer, likewise",
    ),
    *BUFFERS.has(main_grad="a parameter's gradient in its buffer"),
    *Place("megatron.core.distributed", "DistributedDataParallelConfig").has(
        bucket_size="elements of a bucket",
        overlap_grad_reduce="whether gradients are reduced as they come",
    ),
)

# Megatron's own Muon, whose row is left out where that optimizer cannot be built. Some
# names are imported only where its package is installed.
_EARLY = Place("megatron.core.optimizer.muon", since=16, until=17)
_LATER = Place("megatron.core.optimizer.emerging_optimizers", since=18)
_LAYER_WISE = Place("megatron.core.optimizer.layer_wise_optimizer", since=18)
_WHOLE = Place(_LAYER_WISE.module, "LayerWiseDistributedOptimizer", since=18)
_CONFIG = Place("megatron.core.optimizer", "OptimizerConfig", since=16)
_TIMED = "its iteration, timed"
UPSTREAM: tuple[Row, ...] = (
    Place("megatron.core.optimizer", since=17).read(
        "HAVE_EMERGING_OPTIMIZERS", "whether it can run, for doctor"
    ),
    _EARLY.read("HAVE_EMERGING_OPTIMIZERS", "whether it can run"),
    _LATER.read("HAVE_EMERGING_OPTIMIZERS", "whether it can run"),
    _EARLY.replaced("newton_schulz_tp", _TIMED),
    _LATER.replaced("newton_schulz_tp", _TIMED),
    _WHOLE.replaced("allgather_params", "its gather, timed", since=16, until=17),
    _WHOLE.replaced(
        "start_param_sync_for_bucket_group_subset", "the same in later versions"
    ),
    _WHOLE.called("compute_full_param_layout", "its layout of the grad buffers"),
    _LAYER_WISE.called("tag_params_for_buffer_routing", "marks that decide the layout"),
    STATE.called(
        "get_expert_data_parallel_world_size",
        "over how many ranks its layout cuts a buffer of experts' weights",
        since=18,
    ),
    *Place(
        "megatron.core.optimizer.optimizer", "Float16OptimizerWithFloat16Params", 16
    ).has(
        float16_groups="parameters that have fp32 main parameters",
        fp32_from_float16_groups="their fp32 main parameters",
    ),
    *_CONFIG.has(
        muon_momentum="its momentum",
        muon_num_ns_steps="its steps",
        muon_extra_scale_factor="its scale",
        muon_tp_mode="how it handles TP",
    ),
    *_CONFIG.has(until=17, muon_use_nesterov="its kind of momentum"),
    *_CONFIG.has(
        since=18,
        muon_nesterov="its kind of momentum",
        use_layer_wise_distributed_optimizer="switches it on",
    ),
)
# Of that package itself.
PACKAGE = (
    Place("emerging_optimizers").read("__version__", "the installed release"),
    Place("emerging_optimizers.orthogonalized_optimizers.muon_utils").replaced(
        "newton_schulz", "the iteration that newton_schulz_tp calls, timed"
    ),
)
