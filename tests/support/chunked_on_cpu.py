"""dev's ChunkedOptimizerStateOffloader on a CPU: its own code, told which tensors are
on a GPU.

All are but those that it has made for the host. What leaves a GPU is overwritten there,
and what comes is there once its event is waited for: whoever reads too late or too
early finds no number.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from contextlib import nullcontext
from typing import Any

import torch

NAME = "megatron.core.optimizer.cpu_offloading.chunked_optimizer_state_offload"
EXISTS = importlib.util.find_spec(NAME) is not None  # in NVIDIA's branch dev
_on_host: dict[
    int, torch.Tensor
] = {}  # by address; kept, so that no other tensor gets one


def install() -> None:
    """From now on; twice is once."""
    module = importlib.import_module(NAME)
    if torch.cuda.is_available() or hasattr(module, "_cuda"):
        return
    source = inspect.getsource(module)
    for pattern, told, count in (
        (
            r"gpu_tensor\.copy_\(cpu_tensor, non.*\)",
            "_cuda.coming.append((gpu_tensor, cpu_tensor))",
            2,
        ),
        (
            r"gpu_tensor\.record_stream\(self\._h2d_stream\)",
            "_cuda.overwrite(gpu_tensor)",
            2,
        ),
        (
            r"gpu_tensor\.record_stream\(self\._d2h_stream\)",
            "_cuda.overwrite(gpu_tensor)",
            2,
        ),
        (r"(\w[\w.]*)\.is_cuda", r"_cuda.is_on_gpu(\1)", 9),
        (r'(\w+)\.device\.type == "cpu"', r"(not _cuda.is_on_gpu(\1))", 3),
        (r"\w+\.is_pinned\(\)", "True", 3),
        (
            r"torch\.empty\(\n\s+tensor\.size.*pin_memory=True\n\s+\)",
            "_cuda.of_host(tensor)",
            1,
        ),
        (r"torch\.cuda\.", "_cuda.", 22),
    ):
        source, found = re.subn(pattern, told, source)
        assert found == count, (pattern, found)
    vars(module)["_cuda"] = _cuda
    exec(source, vars(module))
    optimizer: Any = importlib.import_module("megatron.core.optimizer.optimizer")
    optimizer.ChunkedOptimizerStateOffloader = vars(module)[
        "ChunkedOptimizerStateOffloader"
    ]


class _Event:
    def record(self, stream: Any) -> None:
        self.copies, _cuda.coming = _cuda.coming, []


class _Stream:
    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, event: _Event) -> None:
        for target, source in event.copies:
            target.copy_(source)
        event.copies = []


class _Cuda:
    """In the place of torch.cuda."""

    Event, Stream, current_stream = _Event, _Stream, _Stream

    def __init__(self) -> None:
        self.coming: list[tuple[torch.Tensor, torch.Tensor]] = []

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() not in _on_host

    def of_host(self, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(tensor)
        return _on_host.setdefault(made.data_ptr(), made)

    def overwrite(self, tensor: torch.Tensor) -> None:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)


_cuda: Any = _Cuda()
