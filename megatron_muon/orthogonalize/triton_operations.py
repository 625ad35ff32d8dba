"""Operations of ``torch.ops.megatron_muon``, which triton's kernels do on CUDA.

As operations of torch's dispatch they are seen by whoever watches it: every tensor that
they read or write.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("megatron_muon", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(schema: str, kernel: Callable[..., Any]) -> None:
    """Define an operation without results by its kernel, on a CPU in triton's
    interpreter.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CUDA")
    _LIBRARY.impl(name, kernel, "CPU")
    _LIBRARY.impl(name, lambda *args: None, "Meta")


def launching_beside(tensor: Tensor) -> AbstractContextManager[None]:
    """A context in which the tensor's CUDA device is the current one, where triton
    launches.
    """
    return torch.cuda.device(tensor.get_device() if tensor.is_cuda else -1)


@cache
def has_triton() -> bool:
    """Whether triton is installed; ``rules.fused.try_elementwise`` finds out if it
    works.
    """
    return importlib.util.find_spec("triton") is not None
