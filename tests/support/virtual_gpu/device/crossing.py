"""Crossings between the host and the GPU, and where the host waits for them.

As torch does it: a copy waits unless it is ``non_blocking``, and CUDA waits for one of
pageable memory all the same. An element that the host reads is a copy that it waits
for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from support.virtual_gpu.device.tensors import META, VirtualTensor

if TYPE_CHECKING:
    from support.virtual_gpu.device.gpu import Gpu


def without_pinning(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k != "pin_memory"} if kwargs else kwargs


def _read_scalar(gpu: Gpu, func: Any, args: Any, kwargs: Any) -> Any:
    (tensor,) = args
    if not isinstance(tensor, VirtualTensor):
        return NotImplemented
    gpu.launch("copy to host", [tensor], [])
    gpu.synchronize("item", gpu.stream)
    return torch.zeros((), dtype=tensor.dtype).item()


def _equal(gpu: Gpu, func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [x for x in args if isinstance(x, VirtualTensor)]
    if not tensors:
        return NotImplemented
    gpu.launch("equal", tensors, [])
    gpu.synchronize("equal", gpu.stream)
    return True


def _to_copy(gpu: Gpu, func: Any, args: Any, kwargs: Any) -> Any:
    (tensor,), device = args, kwargs.get("device")
    there = isinstance(tensor, VirtualTensor)
    if device is None or (device.type == "cuda") is there:
        return NotImplemented
    dtype = kwargs.get("dtype") or tensor.dtype
    if there:
        gpu.launch("copy to host", [tensor], [])
        if not kwargs.get("non_blocking"):  # for that torch takes pinned memory
            gpu.synchronize("cpu", gpu.stream)
        return torch.zeros(tensor.shape, dtype=dtype)
    made = gpu.allocate(
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=META)
    )
    _copied_from_host(gpu, made, tensor, bool(kwargs.get("non_blocking")))
    return made


def _copy(gpu: Gpu, func: Any, args: Any, kwargs: Any) -> Any:
    target, source, *rest = args
    there = isinstance(target, VirtualTensor)
    here = isinstance(source, VirtualTensor)
    if there is here:
        return NotImplemented
    free = bool(rest[0] if rest else kwargs.get("non_blocking"))
    if there:
        _copied_from_host(gpu, target, source, free)
        return target
    gpu.launch("copy to host", [source], [])
    if not (free and is_pinned(target)):
        gpu.synchronize("copy to host", gpu.stream)
    return target.zero_()


def _copied_from_host(
    gpu: Gpu, target: VirtualTensor, source: Tensor, free: bool
) -> None:
    """Torch waits for a copy unless it is non-blocking, and CUDA for one of pageable
    memory.
    """
    gpu.launch("copy from host", [], [target])
    if target.numel() and not (free and is_pinned(source)):
        gpu.synchronize("copy from host", gpu.stream)


def pinned(tensor: Tensor) -> Tensor:
    """``Tensor.pin_memory()`` of a CPU tensor."""
    made = tensor.clone()
    made._virtually_pinned = True
    return made


def is_pinned(tensor: Tensor) -> bool:
    """Whether a CPU tensor was pinned; a view of a pinned tensor is not known to be."""
    return bool(getattr(tensor, "_virtually_pinned", False))


# Each takes the GPU, the operation and its arguments; its result is ``NotImplemented``
# where it leaves the operation to others.
CROSSINGS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "_local_scalar_dense": _read_scalar,
    "equal": _equal,
    "_to_copy": _to_copy,
    "copy_": _copy,
}
