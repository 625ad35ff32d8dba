"""``--muon-trace-steps``: traces of chosen steps on every rank, in Megatron-LM's
training loop.
"""

from __future__ import annotations

import atexit
import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_muon.console import say
from megatron_muon.megatron_lm.flags.namespace import parsed
from megatron_muon.runtime.patches import Function

if TYPE_CHECKING:
    from megatron_muon.mcore.wiring.step_traces import MegatronTraces

FOLDER = "traces"


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
