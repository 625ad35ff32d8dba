"""Megatron-LM's saving and loading of a run: what is done around it where the run is Muon's."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

from megatron_muon.training.namespace import is_on

# What a checkpoint's arguments call the optimizer. The saver of tools/checkpoint hands them to
# validate_args of a Megatron without the plugin, and that of 0.16 and 0.17 stops where "muon" is in
# the name beside use_distributed_optimizer.
SAVED_NAME = "Muon"


def generate_state_dict(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Megatron's, with arguments that its tools can read without the plugin."""
    state_dict = original(args, *rest, **kwargs)
    if is_on(args) and state_dict.get("args") is args:
        state_dict["args"] = copy.copy(args)
        state_dict["args"].optimizer = SAVED_NAME
    return state_dict


def load_checkpoint(
    original: Callable[..., Any],
    ddp_model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's; with ``--override-opt_param-scheduler`` also parameter groups keep their rates.

    Megatron overrides the scheduler's, but the groups have rates of their own, which go first and
    come from the checkpoint. AdamW's run goes on with the old ones (0.12.3), or ends in a KeyError
    since no group that was saved has the new ones (0.19.0 and main).
    """
    from megatron_muon.mcore.checkpoint_groups import SCHEDULE

    given = importlib.import_module("megatron.training").get_args()
    groups = optimizer.param_groups if is_on(given) and optimizer is not None else []
    rates = [{key: group[key] for key in SCHEDULE if key in group} for group in groups]
    result = original(ddp_model, optimizer, opt_param_scheduler, *args, **kwargs)
    if rates and given.override_opt_param_scheduler:
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group.update(own)
    return result
