"""Steps and lines of Megatron-LM's loop, and its TensorBoard and W&B writers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from megatron_muon.mcore.host.loop import Host


class MegatronLM(Host):
    """Steps are its iterations; scalars go where it writes."""

    def step(self) -> int | None:
        """The iteration under way, as Megatron's log numbers it; None outside its
        loop.
        """
        before = _argument("curr_iteration")
        return None if before is None else before + 1

    def log_interval(self) -> int | None:
        """``--log-interval``."""
        return _argument("log_interval")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """To TensorBoard and W&B, where the run has them."""
        variables = importlib.import_module("megatron.training.global_vars")
        tensorboard = variables.get_tensorboard_writer()
        wandb = variables.get_wandb_writer()
        if tensorboard is not None:
            for name, value in scalars.items():
                tensorboard.add_scalar(name, value, step)
        if wandb is not None:
            wandb.log(dict(scalars), step)


def _argument(name: str) -> int | None:
    return getattr(importlib.import_module("megatron.training").get_args(), name, None)
