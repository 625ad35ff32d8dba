"""What the virtual GPU uses of Megatron's code and of torch's internals: rows as the
package's.
"""

from megatron_muon.mcore.seams.row import Row

_CLIP = "megatron.core.optimizer.clip_grads"
_RANDOM = "megatron.core.tensor_parallel.random"
_FORK = "the tracker, whose fork is replaced: no random number is drawn"
SEAMS = (
    Row(_RANDOM, "get_cuda_rng_tracker", "called", _FORK),
    Row(
        _CLIP, "multi_tensor_applier", "replaced", "calls a kernel on lists of tensors"
    ),
    Row(_CLIP, "l2_norm_impl", "replaced", "Transformer Engine's norm of gradients"),
    Row(_CLIP, "multi_tensor_scale_impl", "replaced", "its scaling of gradients"),
    Row(
        _CLIP,
        "multi_tensor_scale_tensor_impl",
        "replaced",
        "by a GPU's factor",
        since=(0, 18),
    ),
    Row(
        "torch._C",
        "_disabled_torch_function_impl",
        "read",
        "a tensor's functions are torch's",
    ),
    Row(
        "torch.distributed.distributed_c10d",
        "_world.pg_group_ranks",
        "read",
        "the ranks of every process group",
    ),
)
