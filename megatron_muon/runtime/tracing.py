"""The parts of a step by name: in profiler traces, in NVTX, in Megatron's timers and in
errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

Phase = Callable[[str], AbstractContextManager[None]]

TIMER_LOG_LEVEL = 2  # of Megatron's --timing-log-level: a timer there waits for the GPU


def phases(config: Any = None) -> Phase:
    """A function that makes a context manager per phase, e.g. ``with
    phase("muon/gather")``.

    Args:
        config: Megatron's OptimizerConfig. Its ``timers``, where the run has some, show
            a phase as ``muon-gather`` at ``TIMER_LOG_LEVEL`` and above.
    """

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        nvtx: Any = nullcontext()  # torch's range is an untyped generator
        if torch.cuda.is_available():
            nvtx = torch.cuda.nvtx.range(name)
        timers = getattr(config, "timers", None)
        with record_function(name), nvtx, _timed(timers, name):
            try:
                yield
            except Exception as error:
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"in phase {name} of the optimizer's step")
                raise

    return phase


@contextmanager
def _timed(timers: Any, name: str) -> Iterator[None]:
    if timers is None:
        yield
        return
    timer = timers(name.replace("/", "-"), log_level=TIMER_LOG_LEVEL)
    timer.start()
    try:
        yield
    finally:
        timer.stop()
