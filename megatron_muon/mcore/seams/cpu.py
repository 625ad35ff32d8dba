"""Megatron's symbols that the CPU runtime uses.

``cpu.table`` says why each is replaced. When the runtime is switched on, ``Patches.set`` raises for
a name that is missing. ``doctor`` checks these rows on machines that would use the runtime.
"""

from __future__ import annotations

from megatron_muon.mcore.seams.row import NEWEST, OLDEST, Seam, Use, Version

_OPTIMIZER = "megatron.core.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
_RANDOM = "megatron.core.tensor_parallel.random"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_ATTENTION = "megatron.core.transformer.dot_product_attention"
_MOE = "megatron.core.transformer.moe"
_INITIALIZE = "megatron.training.initialize"


def _seam(
    module: str,
    name: str,
    use: Use,
    relied_on: str,
    since: Version = OLDEST,
    until: Version = NEWEST,
    parameters: tuple[str, ...] = (),
) -> Seam:
    return Seam(module, name, use, relied_on, parameters, since, until, part="cpu")


SEAMS = (
    # --- optimizers
    _seam(_OPTIMIZER, "Adam", "replaced", "a fused Adam's stand-in"),
    _seam(_DISTRIBUTED, "Adam", "replaced", "a fused Adam's stand-in"),
    _seam(_OPTIMIZER, "USING_PYTORCH_OPTIMIZER", "replaced", "False, as on a GPU", (0, 15)),
    _seam(_DISTRIBUTED, "HAVE_APEX_OR_TE", "replaced", "True, as on a GPU"),
    _seam(
        "megatron.core.fp8_utils",
        "_quantize_param_shard_impl",
        "replaced",
        "casts fp8 parameters; there are none here",
    ),
    # --- random numbers
    _seam(_RANDOM, "_set_cuda_rng_state", "replaced", "sets the CPU generator's state"),
    _seam(_RANDOM, "_get_cuda_rng_state", "replaced", "reads the CPU generator's state"),
    _seam(_RANDOM, "__name__", "read", "the name of its logger; one warning is filtered"),
    # --- attention
    _seam(
        _ATTENTION,
        "DotProductAttention",
        "replaced",
        "attention without Transformer Engine",
    ),
    _seam(
        _ATTENTION,
        "DotProductAttention.__init__",
        "replaced",
        "takes head sizes of latent attention, and no context parallelism",
        parameters=("config",),
    ),
    _seam(
        _ATTENTION,
        "DotProductAttention.forward",
        "replaced",
        "attends to the keys and values of all context-parallel ranks",
        parameters=("query", "key", "value", "attention_mask"),
    ),
    _seam(
        "megatron.core.transformer.multi_latent_attention",
        "HAVE_TE",
        "replaced",
        "whether Transformer Engine is installed",
        (0, 14),
    ),
    _seam(
        "megatron.core.extensions.transformer_engine",
        "HAVE_TE",
        "read",
        "whether Transformer Engine is installed",
        (0, 14),
    ),
    _seam(
        "megatron.core.parallel_state",
        "get_context_parallel_group",
        "called",
        "the ranks that share a sequence",
    ),
    _seam("megatron.core.transformer.enums", "AttnMaskType.causal", "read", "the causal mask"),
    _seam(
        _MAPPINGS,
        "gather_from_sequence_parallel_region",
        "called",
        "gathers over ranks, with a gradient",
        parameters=("group",),
    ),
    # --- experts
    _seam(_MAPPINGS, "_gather_along_first_dim", "replaced", "takes uneven parts, too"),
    _seam(_MAPPINGS, "_reduce_scatter_along_first_dim", "replaced", "takes uneven parts, too"),
    _seam(
        f"{_MOE}.moe_utils",
        "RouterGatingLinearFunction",
        "read",
        "where it exists, moe_utils tests a name that only Transformer Engine's import defines",
        (0, 14),
    ),
    _seam(f"{_MOE}.moe_utils", "maybe_move_tensor_to_cpu", "replaced", "takes CPU tensors, too"),
    _seam(f"{_MOE}.token_dispatcher", "maybe_move_tensor_to_cpu", "replaced", "likewise"),
    _seam(
        f"{_MOE}.grouped_gemm_util",
        "grouped_gemm",
        "replaced",
        "a package of kernels",
        until=(0, 16),
    ),
    _seam(f"{_MOE}.grouped_gemm_util", "ops", "replaced", "its functions", until=(0, 16)),
    # --- norms
    _seam(
        "megatron.core.transformer.torch_norm",
        "WrappedTorchNorm",
        "replaced",
        "torch's norm, also under sequence parallelism",
    ),
    _seam(
        "megatron.core.transformer.torch_norm",
        "WrappedTorchNorm.__new__",
        "replaced",
        "makes such a norm",
        parameters=("config",),
    ),
)


def _of_scripts(module: str, name: str, use: Use, relied_on: str, until: Version = NEWEST) -> Seam:
    return Seam(module, name, use, relied_on, until=until, part="cpu_training")


# Symbols of Megatron-LM's scripts, checked only where those are installed.
TRAINING = (
    _of_scripts(_INITIALIZE, "initialize_megatron", "replaced", "is told that there may be no GPU"),
    _of_scripts(_INITIALIZE, "set_jit_fusion_options", "replaced", "nothing is fused"),
    _of_scripts(_INITIALIZE, "fused_kernels", "read", "whether kernels are loaded", until=(0, 16)),
    _of_scripts(
        "megatron.legacy.fused_kernels", "load", "replaced", "loads no kernels", until=(0, 16)
    ),
)
