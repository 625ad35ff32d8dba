"""The parts of a step by name: in profiler traces, in NVTX, in Megatron's timers and in
errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.profiler import record_function

from megatron_muon.runtime.patches import Function

Phase = Callable[[str], AbstractContextManager[None]]

TIMER_LOG_LEVEL = 2  # of Megatron's --timing-log-level: a timer there waits for the GPU


def named_range(name: str) -> AbstractContextManager[Any]:
    """A range in profiler traces.

    torch's ``record_function`` takes the host 5 us, traced or not, so it is used only
    where a profiler of this process is on. A profiler from outside, such as Kineto's
    daemon, sees the range by its faster counterpart, as an operation.
    """
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return record_function(name)
    return _RecordFunctionFast(name)


def marking(name: str) -> Function:
    """A wrapper for ``Patches.wrap``, which puts a call into the range ``name``."""

    def marked(original: Function, *args: Any, **kwargs: Any) -> Any:
        with named_range(name):
            return original(*args, **kwargs)

    return marked


def phases(config: Any = None) -> Phase:
    """A function that makes a context manager per phase, e.g. ``with
    phase("muon/gather")``.

    Args:
        config: Megatron's OptimizerConfig. Its ``timers``, where the run has some, show
            a phase as ``muon-gather`` at ``TIMER_LOG_LEVEL`` and above.
    """

    nvtx: Any = nullcontext  # torch's range is an untyped generator
    if torch.cuda.is_available():
        nvtx = torch.cuda.nvtx.range

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        timers = getattr(config, "timers", None)
        timed = nullcontext() if timers is None else _timed(timers, name)
        with named_range(name), nvtx(name), timed:
            try:
                yield
            except Exception as error:
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"in phase {name} of the optimizer's step")
                raise

    return phase


@contextmanager
def _timed(timers: Any, name: str) -> Iterator[None]:
    timer = timers(name.replace("/", "-"), log_level=TIMER_LOG_LEVEL)
    timer.start()
    try:
        yield
    finally:
        timer.stop()
