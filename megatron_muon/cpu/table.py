"""Everything that ``enable()`` replaces, in the order in which it is applied.

Each is a function whose doc string says what it replaces and why. Line numbers in them
are those of core 0.16.1 where no other version is named.
"""

from collections.abc import Callable

from megatron_muon.cpu import (
    attention,
    experts,
    gloo,
    matmul,
    megatron_core,
    spawned,
    torch_cuda,
)
from megatron_muon.runtime.patches import Patches

Replacement = Callable[[Patches], None]

BEFORE_MEGATRON = (
    torch_cuda.current_device,
    torch_cuda.factories,
    torch_cuda.moves,
    torch_cuda.tensor_type,
    torch_cuda.rng,
    torch_cuda.streams,
    torch_cuda.nvtx,
    torch_cuda.compiler,
    matmul.products,
    gloo.coalesced,
    gloo.one_device,
    spawned.processes,
)
# Local modules are not built without these, whatever the device: a GPU run has
# Transformer Engine's in their place.
FOR_MODULES = (
    megatron_core.sequence_parallel_norm,
    experts.grouped_gemm,
    attention.multi_latent,
    attention.context_parallel,
)
AFTER_MEGATRON = (
    megatron_core.adam,
    megatron_core.no_fp8_parameters,
    megatron_core.rng_states,
    megatron_core.pipeline_outputs,
    experts.router,
    experts.split_sizes,
    experts.uneven_parts,
    *FOR_MODULES,
)
REPLACEMENTS = (*BEFORE_MEGATRON, *AFTER_MEGATRON)
