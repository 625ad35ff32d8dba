"""Megatron as it is where neither Transformer Engine nor Apex is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torchs_own_adam() -> Iterator[None]:
    """Within it Megatron builds its optimizers around torch's AdamW, and saves them so."""
    from megatron.core import optimizer as mcore_optimizer
    from megatron.core.optimizer import distrib_optimizer

    changes = [
        (mcore_optimizer, "Adam", torch.optim.AdamW),
        (mcore_optimizer, "USING_PYTORCH_OPTIMIZER", True),
        (distrib_optimizer, "Adam", torch.optim.Adam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", False),
        (distrib_optimizer, "USING_TE_OPTIMIZER", False),
    ]
    changes = [change for change in changes if hasattr(*change[:2])]  # old ones lack some
    before = [getattr(module, name) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)
