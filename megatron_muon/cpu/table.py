"""The table of everything that ``enable()`` replaces, in the order in which it is applied.

Line numbers are those of core 0.16.1 where no other version is named.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from megatron_muon.cpu import attention, experts, gathers, matmul, megatron_core, torch_cuda
from megatron_muon.runtime.patches import Patches


@dataclass(frozen=True)
class Replacement:
    """One thing that stands in for the GPU: a name, the reason, and what puts it in place.

    Attributes:
        when: whether it needs Megatron imported.
        for_modules: local modules are not built without it, whatever the device: a GPU run has
            Transformer Engine's in their place.
    """

    name: str
    why: str
    apply: Callable[[Patches], None] = field(repr=False)
    when: Literal["before megatron", "after megatron"] = "before megatron"
    for_modules: bool = False


REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement(
        "torch.cuda.current_device, set_device",
        "layers, buffers and p2p allocate on current_device() (tensor_parallel/layers.py:261)",
        torch_cuda.current_device,
    ),
    Replacement(
        "factories with device='cuda' or pin_memory",
        "optimizer.py:473, clip_grads.py:103, schedules.py:596 name 'cuda' outright",
        torch_cuda.factories,
    ),
    Replacement(
        "Tensor.cuda, Tensor.to('cuda'), Tensor.pin_memory",
        "batches and loaded scaler state are moved to the GPU; Module.cuda goes through these",
        torch_cuda.moves,
    ),
    Replacement(
        "Tensor.type() says 'torch.cuda.*'",
        "the optimizers sort parameters by that name (distrib_optimizer.py:361, optimizer.py:671)",
        torch_cuda.tensor_type,
    ),
    Replacement(
        "torch.cuda RNG state and seed",
        "the RNG tracker seeds and saves the GPU's generator (tensor_parallel/random.py:235)",
        torch_cuda.rng,
    ),
    Replacement(
        "streams, events, captures, synchronize",
        "called around p2p (p2p_communication.py:398), timers and the overlapped reductions of "
        "several optimizer instances (distributed_data_parallel.py:230); CPU work is in order",
        torch_cuda.streams,
    ),
    Replacement(
        "nvtx ranges",
        "utils.py:2186 marks profiler ranges; a CPU build of torch has no NVTX",
        torch_cuda.nvtx,
    ),
    Replacement(
        "torch.compile",
        "megatron.core.jit compiles the fused functions, which on a CPU needs a C++ compiler and "
        "seconds for each function on each rank; eager gives the same values",
        torch_cuda.compiler,
    ),
    Replacement(
        "bf16/fp16 matrix products",
        "aten mm, bmm, addmm, baddbmm compute in fp32 and round once, as tensor cores do; only "
        "where the CPU has no bf16 instructions and torch's own kernel is about 40 times slower",
        matmul.products,
    ),
    Replacement(
        "coalesced all-gathers",
        "Megatron's gather of the parameters (distributed/param_and_grad_buffer.py:290); gloo's "
        "goes around a ring, one step after the other, and takes about three times as long as "
        "broadcasts that are under way together",
        gathers.coalesced,
    ),
    Replacement(
        "FusedAdam",
        "the optimizer takes the branches of a GPU run with Transformer Engine; those for plain "
        "torch Adam lose the step on load (distrib_optimizer.py:642, 818)",
        megatron_core.adam,
        "after megatron",
    ),
    Replacement(
        "cast of no fp8 parameters",
        "core 0.12 asks for Transformer Engine in each step of the distributed optimizer, though "
        "no parameter is fp8 (fp8_utils.py:301 of core 0.12.3)",
        megatron_core.no_fp8_parameters,
        "after megatron",
    ),
    Replacement(
        "RNG state of the tracker's fork",
        "megatron.core.tensor_parallel.random writes to torch.cuda.default_generators",
        megatron_core.rng_states,
        "after megatron",
    ),
    Replacement(
        "torch norm under sequence parallelism",
        "WrappedTorchNorm refuses it (torch_norm.py:32) because nothing marks its parameters",
        megatron_core.sequence_parallel_norm,
        "after megatron",
        for_modules=True,
    ),
    Replacement(
        "MoE router without Transformer Engine",
        "moe_utils.py:1192 tests te_general_gemm, a name that only a successful import defines",
        experts.router,
        "after megatron",
    ),
    Replacement(
        "split sizes of the alltoall dispatcher",
        "maybe_move_tensor_to_cpu makes numpy arrays of GPU tensors only, and the all-to-all "
        "(mappings.py:444) cannot take sizes as CPU tensors",
        experts.split_sizes,
        "after megatron",
    ),
    Replacement(
        "gather and reduce-scatter of uneven parts",
        "gloo wants equal parts; the alltoall dispatcher over expert tensor parallelism gives each "
        "rank another number of tokens (mappings.py:150, 194), so they are padded",
        experts.uneven_parts,
        "after megatron",
    ),
    Replacement(
        "grouped_gemm",
        "the legacy GroupedMLP takes its products from a CUDA package (grouped_gemm_util.py:16)",
        experts.grouped_gemm,
        "after megatron",
        for_modules=True,
    ),
    Replacement(
        "multi-latent attention without Transformer Engine",
        "its constructor does not take the head sizes k_channels and v_channels that "
        "multi_latent_attention.py:155 hands it, only Transformer Engine's does; and line 185 asks "
        "isinstance of a mock, because HAVE_TE is True there without Transformer Engine",
        attention.multi_latent,
        "after megatron",
        for_modules=True,
    ),
    Replacement(
        "context parallelism in DotProductAttention",
        "it leaves that to Transformer Engine (dot_product_attention.py:58); keys and values are "
        "gathered over the group, with the causal mask of the true positions",
        attention.context_parallel,
        "after megatron",
        for_modules=True,
    ),
)


def build_local_modules(patches: Patches) -> None:
    """Apply what local modules need to be built, and nothing that stands in for a device."""
    for replacement in REPLACEMENTS:
        if replacement.for_modules:
            replacement.apply(patches)
