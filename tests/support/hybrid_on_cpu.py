"""Megatron's HybridDeviceOptimizer on a CPU: its own code, told that weights are on a
GPU.

It asks each tensor ``is_cuda`` to find what is to live on the host: all but the copies
it made.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import torch

_ASKS = "param.is_cuda"
_IN_A_SUM = f" if {_ASKS}]"


def install() -> None:
    """Have the weights taken for a GPU's from now on; twice is once."""
    from megatron.core import optimizer as core
    from megatron.core.optimizer.cpu_offloading import (
        HybridDeviceOptimizer,
        hybrid_optimizer,
    )

    method = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    if torch.cuda.is_available() or method.__module__ == __name__:
        return
    # Megatron saves these among AdamW's groups, and cannot load them itself.
    torch.serialization.add_safe_globals([torch.optim.AdamW, core.Adam])
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(_ASKS) == 3 and source.count(_IN_A_SUM) == 1
    source = source.replace(_IN_A_SUM, "]").replace(_ASKS, "(not cpu_copy)")
    names: dict[str, Any] = {**vars(hybrid_optimizer), "__name__": __name__}
    exec(source, names)
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = names[method.__name__]
