"""Tensors on a ``cuda`` device that has no memory.

A ``VirtualTensor`` says ``cuda`` to everyone who asks and computes nothing. Each
operation runs on tensors of torch's meta device, which have shapes and strides and no
elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from support.virtual_gpu.trace import Free, Range, RecordStream

if TYPE_CHECKING:
    from support.virtual_gpu.device.gpu import Gpu

CUDA = torch.device("cuda", 0)
META = torch.device("meta")


class VirtualTensor(Tensor):
    """A tensor on the virtual GPU."""

    inner: Tensor
    block: DeviceBlock  # its memory, shared with its views
    is_foreign: (
        bool  # its storage is not of torch's allocator, so that it records no stream
    )
    device_of: ClassVar[Gpu | None] = None  # the GPU that is switched on

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, inner: Tensor, block: DeviceBlock, *, is_foreign: bool = False
    ) -> VirtualTensor:
        made: VirtualTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=CUDA,
        )
        made.inner, made.block, made.is_foreign = inner, block, is_foreign
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if cls.device_of is None:
            raise RuntimeError(f"{func} of a virtual tensor: its GPU is switched off")
        return cls.device_of.run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return (
            f"VirtualTensor({tuple(self.shape)}, {self.dtype}, block "
            f"{self.block.number})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualTensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, new: VirtualTensor) -> None:
        Tensor.data.__set__(self, new)
        self.inner, self.block = new.inner, new.block

    def data_ptr(self) -> int:
        """An address that is the block's own."""
        return (self.block.number << 42) + _offset(
            self.inner
        ) * self.inner.element_size()

    def tolist(self) -> Any:
        with self.block.gpu.called("tolist"):
            return self.to("cpu").tolist()

    def record_stream(self, stream: Any) -> None:
        self.block.gpu.trace.events.append(RecordStream(self.block.number, stream.name))


def _naming(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, f"__{name}__", None) or getattr(Tensor, name)

    def named(self: VirtualTensor, *args: Any, **kwargs: Any) -> Any:
        with self.block.gpu.called(name):
            return method(self, *args, **kwargs)

    return named


for _name in ("item", "cpu"):
    setattr(VirtualTensor, _name, _naming(_name))
for _name in ("bool", "float", "int", "index"):
    setattr(VirtualTensor, f"__{_name}__", _naming(_name))


@dataclass(slots=True, eq=False)
class DeviceBlock:
    """Memory that the caching allocator gave out; it returns with the last tensor on
    it.
    """

    number: int
    gpu: Gpu

    def __del__(self) -> None:
        trace = self.gpu.trace
        trace.events.append(Free(self.number, trace.phase))


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def ranges(tensors: Sequence[VirtualTensor]) -> list[Range]:
    """The bytes from a tensor's first to its last element, gaps between its rows
    included.
    """
    covered = []
    for tensor in tensors:
        inner = tensor.inner
        if not inner.numel():
            continue
        count = inner.numel()
        if not inner.is_contiguous():
            count = 1 + sum(
                (n - 1) * s for n, s in zip(inner.size(), inner.stride(), strict=True)
            )
        start = _offset(inner)
        size = inner.element_size()
        covered.append((tensor.block.number, start * size, (start + count) * size))
    return covered
