"""Megatron with other Adams than Transformer Engine's: torch's own, and one as Apex's
goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_muon.cpu import FusedAdam
from megatron_muon.runtime.patches import Patches
from support import apex_on_cpu


@contextmanager
def torchs_own_adam() -> Iterator[None]:
    """Within it Megatron builds its optimizers around torch's AdamW, and saves them
    so.
    """
    from megatron.core import optimizer as mcore_optimizer
    from megatron.core.optimizer import distrib_optimizer

    changes = [
        (mcore_optimizer, "Adam", torch.optim.AdamW),
        (mcore_optimizer, "USING_PYTORCH_OPTIMIZER", True),
        (distrib_optimizer, "Adam", torch.optim.Adam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", False),
        (distrib_optimizer, "USING_TE_OPTIMIZER", False),
    ]
    patches = Patches()
    for change in changes:
        patches.set_existing(*change)  # old ones lack some
    try:
        yield
    finally:
        patches.undo()


class ApexsLoop(FusedAdam):
    """Goes through its groups beside its list of master weights, as Apex's FusedAdam
    does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.param_groups_master: list[dict[str, Any]] = [
            {"params": [None for _ in group["params"]]} for group in self.param_groups
        ]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        groups = self.param_groups
        pairs = zip(groups, self.param_groups_master, strict=False)
        self.param_groups = [group for group, _ in pairs]
        try:
            return super().step(*args, **kwargs)
        finally:
            self.param_groups = groups


@contextmanager
def apexs_loop() -> Iterator[None]:
    """Within it Megatron builds its optimizers around an Adam that goes on as Apex's
    does, which is Apex's own where that is installed.
    """
    from megatron.core import optimizer as mcore_optimizer
    from megatron.core.optimizer import distrib_optimizer

    if apex_on_cpu.installed():
        yield
        return
    with (
        mock.patch.object(mcore_optimizer, "Adam", ApexsLoop),
        mock.patch.object(distrib_optimizer, "Adam", ApexsLoop),
    ):
        yield
