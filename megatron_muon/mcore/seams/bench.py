"""Megatron's symbols that only the benchmark uses: checked when it starts, and by ``doctor``.

``upstream`` is its row of Megatron's own Muon, left out where that optimizer cannot be built.
"""

from __future__ import annotations

from megatron_muon.mcore.seams.row import NEWEST, OLDEST, Attribute, Part, Seam, Use, Version

_STATE = "megatron.core.parallel_state"
_DDP = "megatron.core.distributed"
_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer"
_WHOLE = "LayerWiseDistributedOptimizer"
_EARLY = "megatron.core.optimizer.muon"
_LATER = "megatron.core.optimizer.emerging_optimizers"
_EMERGING = "emerging_optimizers"
_UTILS = "emerging_optimizers.orthogonalized_optimizers.muon_utils"


def _upstream(
    module: str,
    name: str,
    use: Use,
    relied_on: str,
    since: Version = (0, 16),
    until: Version = NEWEST,
    inherited: bool = False,
) -> Seam:
    return Seam(module, name, use, relied_on, (), since, until, inherited, "upstream")


def _own(
    module: str,
    owner: str,
    name: str,
    relied_on: str,
    since: Version = OLDEST,
    until: Version = NEWEST,
) -> Attribute:
    part: Part = "upstream" if since > OLDEST else "bench"
    return Attribute(module, owner, name, relied_on, False, since, until, part)


SEAMS = (
    Seam(
        _STATE,
        "get_tensor_model_parallel_rank",
        "called",
        "which part of a weight this rank has",
        part="bench",
    ),
    Seam(
        _STATE,
        "get_data_parallel_rank",
        "called",
        "which part of a batch this rank has",
        part="bench",
    ),
    Seam(
        _STATE,
        "model_parallel_is_initialized",
        "called",
        "whether its process groups are there",
        part="bench",
    ),
    Seam(
        _DDP,
        "DistributedDataParallel.start_grad_sync",
        "called",
        "starts the reduction of gradients",
        part="bench",
    ),
    Seam(
        _DDP,
        "DistributedDataParallel.finish_grad_sync",
        "called",
        "waits for that reduction",
        part="bench",
    ),
    # --- Megatron's own Muon
    _upstream(
        "megatron.core.optimizer",
        "HAVE_EMERGING_OPTIMIZERS",
        "read",
        "whether it can run, for doctor",
        (0, 17),
    ),
    _upstream(_EARLY, "HAVE_EMERGING_OPTIMIZERS", "read", "whether it can run", until=(0, 17)),
    _upstream(_LATER, "HAVE_EMERGING_OPTIMIZERS", "read", "whether it can run", (0, 18)),
    _upstream(_EARLY, "newton_schulz_tp", "replaced", "its iteration, timed", until=(0, 17)),
    _upstream(_LATER, "newton_schulz_tp", "replaced", "its iteration, timed", (0, 18)),
    _upstream(
        _LAYER_WISE,
        f"{_WHOLE}.allgather_params",
        "replaced",
        "its gather of parameters, timed",
        until=(0, 17),
    ),
    _upstream(
        _LAYER_WISE,
        f"{_WHOLE}.start_param_sync_for_bucket_group_subset",
        "replaced",
        "the same in later versions",
        (0, 18),
    ),
    _upstream(
        _LAYER_WISE,
        f"{_WHOLE}.compute_full_param_layout",
        "called",
        "its layout of the grad buffers",
        (0, 18),
    ),
    _upstream(
        _LAYER_WISE,
        "tag_params_for_buffer_routing",
        "called",
        "marks on parameters that decide the layout",
        (0, 18),
    ),
)
PACKAGES = (
    Seam(_EMERGING, "__version__", "read", "the installed release", part="kernels"),
    Seam(
        _UTILS,
        "newton_schulz",
        "replaced",
        "the iteration that newton_schulz_tp calls, timed",
        part="kernels",
    ),
)
ATTRIBUTES = (
    _own(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBuffer",
        "grad_data",
        "all gradients of a buffer, whose memory is freed between rows",
    ),
    _own(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBuffer",
        "param_data",
        "all parameters of a buffer, likewise",
    ),
    _own(
        "megatron.core.distributed.param_and_grad_buffer",
        "",
        "main_grad",
        "a parameter's gradient in its buffer",
    ),
    *(
        _own("megatron.core.distributed", "DistributedDataParallelConfig", name, relied_on)
        for name, relied_on in (
            ("bucket_size", "elements of a bucket"),
            ("overlap_grad_reduce", "whether gradients are reduced as they come"),
        )
    ),
    *(
        _own(
            "megatron.core.optimizer.optimizer",
            "Float16OptimizerWithFloat16Params",
            name,
            relied_on,
            (0, 16),
        )
        for name, relied_on in (
            ("float16_groups", "parameters that have fp32 main parameters"),
            ("fp32_from_float16_groups", "their fp32 main parameters"),
        )
    ),
    *(
        _own("megatron.core.optimizer", "OptimizerConfig", name, relied_on, since, until)
        for name, relied_on, since, until in (
            ("muon_momentum", "its momentum", (0, 16), NEWEST),
            ("muon_num_ns_steps", "its steps", (0, 16), NEWEST),
            ("muon_extra_scale_factor", "its scale", (0, 16), NEWEST),
            ("muon_tp_mode", "how it handles TP", (0, 16), NEWEST),
            ("muon_use_nesterov", "its kind of momentum", (0, 16), (0, 17)),
            ("muon_nesterov", "its kind of momentum", (0, 18), NEWEST),
            ("use_layer_wise_distributed_optimizer", "switches it on", (0, 18), NEWEST),
        )
    ),
)
