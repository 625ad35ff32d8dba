"""``torch.cuda`` as a program asks it, over the streams of a virtual GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_muon.runtime.patches import replaced
from support.virtual_gpu.device.crossing import pinned
from support.virtual_gpu.device.gpu import Gpu
from support.virtual_gpu.device.tensors import CUDA, VirtualTensor
from support.virtual_gpu.trace import MAIN, EventRecord, StreamWait

_CAPABILITY = (9, 0)  # an H100's
_numbers = itertools.count(1)


class Event:
    """A CUDA event."""

    gpu: Gpu

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number: int | None = None  # of its last record

    def record(self, stream: Stream | None = None) -> None:
        self.number = next(_numbers)
        name = self.gpu.stream if stream is None else stream.name
        self.gpu.trace.events.append(EventRecord(self.number, name))

    def wait(self, stream: Stream | None = None) -> None:
        if self.number is not None:  # one that was never recorded is done
            name = self.gpu.stream if stream is None else stream.name
            self.gpu.trace.events.append(StreamWait(self.number, name))

    def synchronize(self) -> None:
        if self.number is not None:
            self.gpu.synchronize("Event.synchronize", event=self.number)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        return 1.0


class Stream:
    """A CUDA stream; it waits for no other unless told."""

    gpu: Gpu
    cuda_stream = 0
    device = CUDA

    def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
        self.name = name or f"stream {next(_numbers)}"
        self._outer: list[str] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_stream(self, stream: Stream) -> None:
        stream.record_event().wait(self)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or torch.cuda.Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.gpu.synchronize("Stream.synchronize", self.name)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        self._outer.append(self.gpu.stream)
        self.gpu.stream = self.name
        return self

    def __exit__(self, *exc: Any) -> None:
        self.gpu.stream = self._outer.pop()


@contextmanager
def on_gpu(gpu: Gpu) -> Iterator[None]:
    """Within it ``torch.cuda`` speaks of ``gpu`` and of nothing else."""
    stream_class = type("Stream", (Stream,), {"gpu": gpu})
    event_class = type("Event", (Event,), {"gpu": gpu})

    changes: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: CUDA,  # only ever passed on as a device
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "Stream": stream_class,
        "Event": event_class,
        "current_stream": lambda device=None: stream_class(name=gpu.stream),
        "default_stream": lambda device=None: stream_class(name=MAIN),
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "synchronize": lambda device=None: gpu.synchronize("torch.cuda.synchronize"),
        "empty_cache": lambda: gpu.synchronize("torch.cuda.empty_cache"),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
    }
    marks = dict.fromkeys(
        ("range_push", "range_pop", "mark"), lambda *args, **kwargs: None
    )
    factories = {
        name: _through_host(getattr(torch, name)) for name in ("tensor", "as_tensor")
    }
    with (
        replaced(torch.cuda, **changes),
        replaced(torch.cuda.nvtx, **marks),
        replaced(torch, **factories),
        replaced(torch.utils.dlpack, from_dlpack=_foreign),
        replaced(Tensor, pin_memory=_pin_memory, cuda=_to_cuda, to=_to_over(Tensor.to)),
    ):
        yield


def _through_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.tensor`` makes a tensor on the host and moves it below any dispatch."""

    def factory(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if isinstance(data, VirtualTensor):
            return original(data, *args, device=device, **kwargs)
        made = original(data, *args, **kwargs)
        if device is None or torch.device(device).type != "cuda":
            return made
        with VirtualTensor.device_of.called("torch.tensor"):
            return made.to(CUDA)

    return factory


def _foreign(tensor: VirtualTensor) -> VirtualTensor:
    """``from_dlpack`` of a tensor: a storage over the same memory."""
    return VirtualTensor(tensor.inner, tensor.block, is_foreign=True)


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    return pinned(tensor)


def _to_cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
    return tensor.to(CUDA, non_blocking=non_blocking)


def _to_over(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to``, where ``cuda`` means the one GPU: torch would ask its device
    guard.
    """

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        named = {key: _named(value) for key, value in kwargs.items()}
        return original(tensor, *map(_named, args), **named)

    return to


def _named(value: Any) -> Any:
    if isinstance(value, str):
        return CUDA if value == "cuda" else value
    return (
        CUDA
        if isinstance(value, torch.device) and value == torch.device("cuda")
        else value
    )
