"""Steps and lines of Megatron-LM's loop, its TensorBoard and W&B writers, and what its
flags leave to choose.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_muon.mcore.host.loop import Host
from megatron_muon.megatron_lm.flags.namespace import parsed

if TYPE_CHECKING:
    from megatron_muon.planning.buckets import Buckets


class MegatronLM(Host):
    """Steps are its iterations; scalars go where it writes."""

    def step(self) -> int | None:
        """The iteration under way, as Megatron's log numbers it; None outside its
        loop.
        """
        before = getattr(parsed(), "curr_iteration", None)
        return None if before is None else before + 1

    def log_interval(self) -> int | None:
        """``--log-interval``."""
        interval: int | None = getattr(parsed(), "log_interval", None)
        return interval

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """To TensorBoard and W&B, where the run has them."""
        variables = importlib.import_module("megatron.training.global_vars")
        tensorboard = variables.get_tensorboard_writer()
        wandb = variables.get_wandb_writer()
        for name, value in scalars.items() if tensorboard is not None else ():
            tensorboard.add_scalar(name, value, step)
        if wandb is not None:
            wandb.log(dict(scalars), step)

    def take_buckets(self, chosen: Buckets) -> None:
        """Print the reason."""
        if chosen.reason:
            start = importlib.import_module("megatron_muon.mcore.wiring.start")
            start.unusual.append(chosen.reason)
