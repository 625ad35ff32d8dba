"""The plugin's part in Megatron-LM's training loop.

``train``: gathers of parameters start within the step, which ``auto`` does in this loop
only. ``train_step``: ``--muon-trace-steps``, traces of chosen steps on every rank.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon.console import say, say_once
from megatron_muon.megatron_lm.flags.namespace import parsed
from megatron_muon.planning.describe import late_gather_line
from megatron_muon.runtime import patches
from megatron_muon.runtime.patches import Function

if TYPE_CHECKING:
    from megatron_muon.mcore.wiring.step_traces import MegatronTraces

FOLDER = "traces"


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


# --- traces of steps ----------------------------------------------------------------


def check_traces(args: Any) -> None:
    """Check the flags of traces before anything is built.

    Raises:
        ValueError: names the flag, and what is wrong with it.
        OSError: the folder cannot be made.
    """
    steps = getattr(args, "muon_trace_steps", None)
    if not steps:
        if getattr(args, "muon_trace_dir", None):
            raise ValueError(
                "--muon-trace-dir has no effect without --muon-trace-steps"
            )
        return
    # imported only where steps are traced
    from megatron_muon.mcore.wiring.step_traces import chosen_steps

    try:
        chosen = chosen_steps(steps)
    except ValueError as error:
        raise ValueError(f"--muon-trace-steps {steps}: {error}") from error
    Path(_folder(args)).mkdir(parents=True, exist_ok=True)
    last = getattr(args, "train_iters", None)
    if last is not None and chosen[-1] > last:
        raise ValueError(
            f"--muon-trace-steps {steps}: the run has --train-iters {last}"
        )
    if getattr(args, "use_pytorch_profiler", False):
        raise ValueError(
            "--muon-trace-steps and --use-pytorch-profiler both start torch's "
            "profiler: use only one of the two"
        )


def train_step(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Megatron's training step, traced if it is one of the chosen ones."""
    flags = parsed()
    steps = getattr(flags, "muon_trace_steps", None)
    if not steps:
        return original(*args, **kwargs)
    optimizer = inspect.signature(original).bind(*args, **kwargs).arguments["optimizer"]
    number = flags.curr_iteration + 1
    with _traces_of(steps, _folder(flags)).step(number, optimizer):
        return original(*args, **kwargs)


def forget_traces() -> None:
    """Forget the traces of a run; for ``uninstall``."""
    _traces_of.cache_clear()


def _folder(args: Any) -> str:
    return getattr(args, "muon_trace_dir", None) or FOLDER


@functools.cache
def _traces_of(steps: str, folder: str) -> MegatronTraces:
    """The traces of this run, made in its first step: they need the process groups."""
    from megatron_muon.mcore.wiring.step_traces import MegatronTraces

    traces = MegatronTraces(steps, folder)
    atexit.register(_say_if_open, traces, steps)
    return traces


def _say_if_open(traces: MegatronTraces, steps: str) -> None:
    if traces.is_open:
        say(
            f"[megatron_muon] --muon-trace-steps {steps}: the run ended before the "
            "last of them, so this rank has written no trace"
        )
