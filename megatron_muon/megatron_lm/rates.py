"""Rates and weight decays of parameter groups after a load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import distrib_optimizer

from megatron_muon.console import say
from megatron_muon.mcore.checkpoint.param_groups import SCHEDULE, Group

# What a scheduler of Megatron reads of a group, in any version.
_READ = (*SCHEDULE, "lr_mult", "wd_mult")
_OPTION = "--override-opt_param-scheduler"


@contextmanager
def of_this_run(optimizer: Any, scheduler: Any, *, override: bool) -> Iterator[None]:
    """A context in which Megatron loads. At its end the scheduler sets rates once more.

    Megatron's scheduler sets them within its own load. It does not read the weight
    decays of the checkpoint before that. With ``override`` it keeps this run's
    schedule, while the rates that the checkpoint gives to the groups have precedence.
    So those of this run are put back first.

    Args:
        optimizer: a chain of Muon's, or of AdamW's that may load Muon's checkpoint; or
            None.
        scheduler: Megatron's OptimizerParamScheduler of ``optimizer``; or None.
        override: whether the run has ``--override-opt_param-scheduler``.
    """
    if optimizer is None:
        yield
        return
    before = [_read(group) for group in optimizer.param_groups]
    yield
    if override:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            for key in _READ:
                group.pop(key, None)
            group.update(own)
    if scheduler is not None:
        scheduler.step(increment=0)


def _read(group: Group) -> Group:
    return {key: group[key] for key in _READ if key in group}


@contextmanager
def watching_adamw(optimizer: Any) -> Iterator[None]:
    """A context in which AdamW loads with ``--override-opt_param-scheduler``.

    Rank 0 prints a line if AdamW's groups have not kept this run's rates, or if the
    load fails.
    """
    before = [_read(group) for group in optimizer.param_groups]
    try:
        yield
    except (KeyError, ValueError):
        if "max_lr" in getattr(distrib_optimizer, "param_group_identifier_keys", ()):
            _warn(
                "this Megatron finds the checkpoint's parameter groups by their rates, "
                "so its load fails where --lr, --min-lr or the decoupled ones have "
                "changed"
            )
        raise
    after = [_read(group) for group in optimizer.param_groups]
    changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    if changed:
        own, loaded = changed[0]
        key = next(key for key in _READ if own.get(key) != loaded.get(key))
        _warn(
            f"Megatron's load has changed the rates of {len(changed)} of {len(before)} "
            f"parameter groups, first {key} from this run's {own.get(key)} to "
            f"{loaded.get(key)}; AdamW trains with these until the run ends"
        )


def _warn(fault: str) -> None:
    if dist.get_rank() == 0:
        say(
            f"[megatron_muon] warning: {_OPTION}: {fault}. Give --no-load-optim: then "
            "moments and schedule start anew. Or keep the checkpoint's schedule and "
            "leave out this flag (before core 0.19 also --decoupled-lr)"
        )
