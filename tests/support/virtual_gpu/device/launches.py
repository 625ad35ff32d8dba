"""How many kernels CUDA launches for an eager operation of aten.

Sources: aten/src/ATen/native/cuda of torch 2.8 and later: ``MultiTensorApply.cuh``,
``ForeachUtils.h``, ``Shape.cu`` (cat), ``Blas.cpp`` (addmm). Views and ``empty`` launch
nothing. Memsets are not kernels: cuBLAS' and reductions' small ones are not counted. An
operation that is not named here launches one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Operations that touch no memory of the GPU, beyond views; in its deterministic mode
# torch fills what it has not written.
EMPTY = "empty empty_like new_empty empty_strided new_empty_strided".split()
FREE = (
    """
    _unsafe_view is_pinned is_same_size sym_size sym_stride sym_numel
""".split()
    + EMPTY
)
# C = beta·D + alpha·A@B into a new C: D is copied into it, then the product is added.
_HAS_TERM = {"addmm", "baddbmm", "addbmm", "addmv"}
_CHUNK, _BLOCKS = 65536, 320  # elements of a chunk, chunks of a launch
_TENSORS = (110, 64, 48, 36, 30)  # of a launch, by the number of lists
_CAT_TENSORS = 128
_NORM_TENSORS = 400  # whose partial sums one launch adds up, at least


def fills_empty() -> bool:
    """Whether torch fills new memory."""
    fills = bool(torch.utils.deterministic.fill_uninitialized_memory)
    return torch.are_deterministic_algorithms_enabled() and fills


def leaves_term(name: str, named: Mapping[str, object]) -> bool:
    """Whether an operation with a linear term neither reads nor copies it, since beta
    is 0.
    """
    return name in _HAS_TERM and named.get("beta") == 0


def launches(
    name: str,
    args: Sequence[object],
    named: Mapping[str, object],
    inputs: Sequence[Tensor],
    out: object,
) -> int:
    """Kernels of one call."""
    if name in _HAS_TERM:
        return 1 if leaves_term(name, named) else 2
    if name in ("cat", "stack"):
        full = sum(1 for tensor in inputs if tensor.numel())
        return -(-full // _CAT_TENSORS)
    if name.startswith("_foreach_"):
        return _foreach(name, args, out)
    if name == "divisors":  # a kernel of tiles, and one that adds them
        return 2
    return 1 if any(t.numel() for t in inputs) or _numel(out) else 0


def multi_tensor_launches(sizes: Sequence[int], lists: int) -> int:
    """Launches of ``multi_tensor_apply`` over tensors of these sizes."""
    most = _TENSORS[min(lists, len(_TENSORS)) - 1]
    count = tensors = blocks = 0
    for size in sizes:
        chunks = -(-size // _CHUNK)
        tensors += 1 if chunks else 0
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == _BLOCKS or (tensors == most and last):
                count += 1
                blocks, tensors = 0, 0 if last else 1
    return count + (1 if blocks else 0)


def _foreach(name: str, args: Sequence[object], out: object) -> int:
    lists: list[list[Tensor]] = [list(a) for a in args if _is_tensors(a)]
    first = lists[0]
    sizes = [tensor.numel() for tensor in first]
    if not _fast(name, lists):
        return sum(1 for size in sizes if size)
    if name == "_foreach_norm":  # zeros, partial sums, and their sums
        return 1 + multi_tensor_launches(sizes, 1) + -(-len(sizes) // _NORM_TENSORS)
    depth = len(lists) + (0 if name.endswith("_") else 1)
    return multi_tensor_launches(sizes, depth)


def _fast(name: str, lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether ATen's multi-tensor kernels take the lists; else each tensor gets a
    kernel.
    """
    first = lists[0]
    for others in lists:
        if any(t.dtype != others[0].dtype for t in others):
            return False
        for one, other in zip(first, others, strict=True):
            if one.shape != other.shape or one.stride() != other.stride():
                return False
    if name == "_foreach_copy_":  # may cast
        return True
    return all(others[0].dtype == first[0].dtype for others in lists) and all(
        t.is_contiguous() or t.mT.is_contiguous() if t.dim() > 1 else t.is_contiguous()
        for t in first
    )


def _is_tensors(value: object) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and isinstance(value[0], Tensor)
    )


def _numel(out: object) -> int:
    if isinstance(out, Tensor):
        return out.numel()
    return sum(_numel(x) for x in out) if isinstance(out, (list, tuple)) else 0
