"""What the CPU runtime replaces and calls; ``cpu.table`` has them.

``cpu`` itself needs no check: when it is switched on, ``Patches.set`` raises for a name
that is missing. ``doctor`` says so before.
"""

from megatron_muon.mcore.seams.optimizer import DISTRIB, OPTIMIZERS
from megatron_muon.mcore.seams.row import Place
from megatron_muon.mcore.seams.training import INITIALIZE

_RANDOM = Place("megatron.core.tensor_parallel.random")
_MAPPINGS = Place("megatron.core.tensor_parallel.mappings")
_ATTENTION = Place("megatron.core.transformer.dot_product_attention")
_NORM = Place("megatron.core.transformer.torch_norm")
_MOE = Place("megatron.core.transformer.moe.moe_utils")
_GROUPED = Place("megatron.core.transformer.moe.grouped_gemm_util", until=16)
ROWS = (
    # --- torch
    Place("torch.utils._device").called(
        "_device_constructors.cache_clear", "what a device context acts on"
    ),
    Place("torch.distributed").called(
        "ProcessGroupGloo._Options", "one device for all groups"
    ),
    Place("torch._dynamo").replaced("config.disable", "uncompiles what is compiled"),
    # --- optimizers
    OPTIMIZERS.replaced("Adam", "a fused Adam's stand-in"),
    DISTRIB.replaced("Adam", "a fused Adam's stand-in"),
    OPTIMIZERS.replaced("USING_PYTORCH_OPTIMIZER", "False, as on a GPU", since=15),
    DISTRIB.replaced("HAVE_APEX_OR_TE", "True, as on a GPU"),
    Place("megatron.core.fp8_utils").replaced(
        "_quantize_param_shard_impl", "there is no fp8 here"
    ),
    # --- pipeline stages
    Place("megatron.core.model_parallel_config", "ModelParallelConfig").replaced(
        "deallocate_pipeline_outputs", "off: gloo reads what is sent"
    ),
    # --- random numbers
    _RANDOM.replaced("_set_cuda_rng_state", "sets the CPU generator's state"),
    _RANDOM.replaced("_get_cuda_rng_state", "reads the CPU generator's state"),
    _RANDOM.read("__name__", "the name of its logger; one warning is filtered"),
    # --- attention
    _ATTENTION.replaced("DotProductAttention", "attention without Transformer Engine"),
    _ATTENTION.replaced(
        "DotProductAttention.__init__(config)", "takes latent head sizes"
    ),
    _ATTENTION.replaced(
        "DotProductAttention.forward(query, key, value, attention_mask)",
        "all ranks' keys",
    ),
    Place("megatron.core.transformer.multi_latent_attention", since=14).replaced(
        "HAVE_TE", "whether Transformer Engine is installed"
    ),
    Place("megatron.core.extensions.transformer_engine", since=14).read(
        "HAVE_TE", "whether Transformer Engine is installed"
    ),
    Place("megatron.core.parallel_state").called(
        "get_context_parallel_group", "the ranks that share a sequence"
    ),
    Place("megatron.core.transformer.enums").read(
        "AttnMaskType.causal", "the causal mask"
    ),
    _MAPPINGS.called("gather_from_sequence_parallel_region(group)", "has a gradient"),
    # --- experts
    _MAPPINGS.replaced("_gather_along_first_dim", "takes uneven parts, too"),
    _MAPPINGS.replaced("_reduce_scatter_along_first_dim", "takes uneven parts, too"),
    _MOE.read(
        "RouterGatingLinearFunction", "tests Transformer Engine's name", since=14
    ),
    _MOE.replaced("maybe_move_tensor_to_cpu", "takes CPU tensors, too"),
    Place("megatron.core.transformer.moe.token_dispatcher").replaced(
        "maybe_move_tensor_to_cpu", "takes CPU tensors, too"
    ),
    _GROUPED.replaced("grouped_gemm", "a package of kernels"),
    _GROUPED.replaced("ops", "its functions"),
    # --- norms
    _NORM.replaced("WrappedTorchNorm", "torch's norm, also under sequence parallelism"),
    _NORM.replaced("WrappedTorchNorm.__new__(config)", "makes such a norm"),
)

# Symbols of Megatron-LM's scripts, checked only where those are installed.
TRAINING = (
    INITIALIZE.replaced("initialize_megatron", "is told that there may be no GPU"),
    INITIALIZE.replaced("set_jit_fusion_options", "nothing is fused"),
    INITIALIZE.read("fused_kernels", "whether kernels are loaded", until=16),
    Place("megatron.legacy.fused_kernels", until=16).replaced(
        "load", "loads no kernels"
    ),
)
