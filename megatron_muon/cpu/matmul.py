"""bf16 and fp16 matrix products through fp32, for CPUs that have no such instructions.

torch's own bf16 product on such a CPU is a scalar loop (1.3 against 87 GFlop/s for fp32
on AVX2). Here the inputs are widened to fp32 (exact), multiplied and summed in fp32,
and the result is rounded once to the input type: what tensor cores do. Every other type
goes to torch's own kernel.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_muon.orthogonalize.matmul import multiplies_bf16
from megatron_muon.runtime.patches import Patches

_HALF = (torch.bfloat16, torch.float16)
_PRODUCTS = {"mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3}  # number of operands


def _widened(tensors: int, into: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel over ``into``, called with ``out=``: that form stays torch's own.

    The first ``tensors`` arguments are the operands, the rest numbers (beta, alpha).
    """

    def product(*args: Any, **numbers: Any) -> Tensor:
        first = args[0]
        if first.dtype not in _HALF:
            return into(*args, **numbers, out=first.new_empty(0))
        wide = [t.float() for t in args[:tensors]]
        out = into(*wide, *args[tensors:], **numbers, out=wide[0].new_empty(0))
        return out.to(first.dtype)

    return product


def products(patches: Patches) -> None:
    """Override the CPU kernels of mm, bmm, addmm and baddbmm; autograd's backward uses
    them too.

    ``mv``, ``dot`` and the in-place and ``out=`` forms keep torch's kernel: Megatron
    does not use them in half precision.
    """
    if multiplies_bf16():
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, tensors in _PRODUCTS.items():
            library.impl(name, _widened(tensors, getattr(torch, name)), "CPU")
    patches.on_undo(library._destroy)
