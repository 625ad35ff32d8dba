"""Saving and loading a run as Megatron's fully_reshardable torch_dist checkpoint."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

import megatron_muon

# Whole weights, so that any topology can load them.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def save(folder: Path, model: Any, optimizer: Any, step: int) -> None:
    """Write everything that the next step depends on."""
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = {**_sharded(model, optimizer, is_loading=False), "step": step}
    dist_checkpointing.save(state, str(folder))


def load(
    args: Namespace, model: Any, optimizer: Any, scheduler: OptimizerParamScheduler
) -> int:
    """Read it, at whatever topology; returns the steps that were taken."""
    if args.finetune:
        weights = {"model": _gpt(model).sharded_state_dict()}
        _gpt(model).load_state_dict(
            dist_checkpointing.load(weights, str(args.load))["model"]
        )
        optimizer.reload_model_params()
        return 0
    how: Any = nullcontext()
    if args.from_other and args.optimizer == "muon":
        how = megatron_muon.reading_adamw(optimizer, args.from_other)
    elif args.from_other:
        how = megatron_muon.reading_muon(optimizer, args.load)
    with how:
        state = _sharded(model, optimizer, is_loading=True)
        loaded = dist_checkpointing.load(state, str(args.load))
        _gpt(model).load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    for group in optimizer.param_groups:  # the schedule is this run's, from its flags
        group.update(max_lr=args.lr, min_lr=args.min_lr)
    step = int(loaded["step"])
    scheduler.step(step)
    return step


def _sharded(model: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    state = {"model": _gpt(model).sharded_state_dict()}
    state["optimizer"] = optimizer.sharded_state_dict(
        state, is_loading, metadata=METADATA
    )
    return state


def _gpt(model: Any) -> Any:
    inner = model.module
    return inner.module if isinstance(inner, Float16Module) else inner
