"""Steps and lines of Megatron-LM's loop, and its TensorBoard and W&B writers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping

_HOST = "megatron_muon.mcore.watching.host"


def connect() -> None:
    """Number steps by Megatron-LM's iterations, log when it logs, write scalars where it writes."""
    host = importlib.import_module(_HOST)
    host.set_host(host.Host(_iteration, _write, _log_interval))


def disconnect() -> None:
    """The reverse of ``connect``; without it, there is nothing to do."""
    host = sys.modules.get(_HOST)
    if host is not None:
        host.set_host(host.NO_HOST)


def _iteration() -> int | None:
    """The iteration under way, as Megatron's log numbers it; None outside its loop."""
    args = importlib.import_module("megatron.training").get_args()
    before: int | None = getattr(args, "curr_iteration", None)
    return None if before is None else before + 1


def _log_interval() -> int | None:
    """``--log-interval``."""
    args = importlib.import_module("megatron.training").get_args()
    interval: int | None = getattr(args, "log_interval", None)
    return interval


def _write(step: int, scalars: Mapping[str, float]) -> None:
    variables = importlib.import_module("megatron.training.global_vars")
    tensorboard, wandb = variables.get_tensorboard_writer(), variables.get_wandb_writer()
    if tensorboard is not None:
        for name, value in scalars.items():
            tensorboard.add_scalar(name, value, step)
    if wandb is not None:
        wandb.log(dict(scalars), step)
