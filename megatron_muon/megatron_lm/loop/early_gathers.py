"""Gathers of parameters within the step, which ``auto`` starts in Megatron-LM's own
loop only.
"""

from __future__ import annotations

import importlib
import inspect
from contextlib import ExitStack
from typing import Any

from megatron_muon.console import say_once
from megatron_muon.megatron_lm.flags.namespace import parsed
from megatron_muon.planning.describe import late_gather_line
from megatron_muon.runtime import patches
from megatron_muon.runtime.patches import Function


def train(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Megatron's training loop, with gathers of parameters within its steps.

    Others train in it, too, by a ``train_step`` of their own that generates samples
    first (ms-swift's GRPO). They may copy parameters after a step, or move them to the
    host.
    """
    optimizer = inspect.signature(original).bind(*args, **kwargs).arguments["optimizer"]
    parts = getattr(optimizer, "chained_optimizers", [])
    found = (getattr(part, "early_gathers", None) for part in parts)
    gathers = [early for early in found if early is not None]
    what = _why_not(original) if gathers else None
    waits = not all(early.is_on for early in gathers)  # with ``auto``
    if what is not None and waits:
        say_once(late_gather_line(what))
    with ExitStack() as stack:
        for early in gathers if what is None else ():
            stack.enter_context(early.turned_on())
        return original(*args, **kwargs)


def _why_not(train: Function) -> str | None:
    """What may read or write parameters in this loop, if anything does."""
    if getattr(parsed(), "perform_rl_step", False):
        return "--perform-rl-step"
    loop = importlib.import_module("megatron.training.training")
    for name, function in (("train", train), ("train_step", loop.train_step)):
        module = _module_of(function)
        if module != loop.__name__:
            return f"the {name} of {module}"
    return None


def _module_of(function: Function) -> str:
    """The module whose code a function runs, under our own wrappers.

    ``__module__`` does not say: ``functools.wraps`` copies it.
    """

    def is_others(one: Any) -> bool:
        return getattr(one, "__globals__", None) is not vars(patches)

    own = inspect.unwrap(function, stop=is_others)
    return str(getattr(own, "__globals__", {}).get("__name__", own))
