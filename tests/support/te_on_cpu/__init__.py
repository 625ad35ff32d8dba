"""Transformer Engine's own Python without CUDA: all of it, over a stub of its compiled
module.

``pip install --no-deps transformer_engine==X`` has all the Python of that version. What
it calls in C++ and CUDA is one module, ``transformer_engine_torch``, whose place
``compiled.py`` takes. Nothing of theirs is copied or changed on disk. So modules,
marks, names, states, quantized tensors, autograd functions and FusedAdam are the real
ones. No kernel is: those are ours, in torch.

``tests/run.sh`` puts a version on PYTHONPATH (``TE=2.12.0 bash tests/run.sh ...``), and
that is the switch: where ``transformer_engine`` is there and a GPU is not, the tests
run over it.

Not in the stub: attention's kernels (Megatron's DotProductAttention takes its place in
a forward pass), fp8 products, MXFP8, blockwise scaling and NVFP4, user buffers. Their
names can be imported and raise NotImplementedError where they are called.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch


def installed() -> tuple[int, ...] | None:
    """The version of the Transformer Engine whose Python the tests run over; None
    without.
    """
    if (
        torch.cuda.is_available()
        or importlib.util.find_spec("transformer_engine") is None
    ):
        return None
    version = importlib.metadata.version("transformer_engine")
    return tuple(int(part) for part in version.split("+")[0].split("."))


TE = installed()
