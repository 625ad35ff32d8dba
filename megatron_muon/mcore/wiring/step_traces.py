"""Traces of the steps of a run with megatron-core, with Megatron's own communication
marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch.profiler import record_function

from megatron_muon.console import say
from megatron_muon.mcore.host.shards import device_of
from megatron_muon.mcore.seams.optimizer import SYNCS
from megatron_muon.mcore.seams.rows import check_rows
from megatron_muon.runtime.collectives import all_gather_numbers
from megatron_muon.runtime.patches import replaced
from megatron_muon.runtime.step_traces import OPTIMIZER, StepTraces

# Megatron's methods that communicate, and their names in a trace.
_MARKS = {
    "start_grad_sync": "grads/reduce",
    "finish_grad_sync": "grads/reduce",
    "start_param_sync": "params/gather",
    "finish_param_sync": "params/gather",
}


class MegatronTraces:
    """Traces steps of a run with megatron-core; see ``megatron_muon.step_traces``."""

    def __init__(self, steps: str, folder: str | Path) -> None:
        check_rows(SYNCS)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._traces = StepTraces(steps, Path(folder), self._rank)
        self._has_begun = False
        self._has_place = False

    @property
    def is_open(self) -> bool:
        """Whether steps have been traced and the last one has not come."""
        return self._traces.is_open

    @contextmanager
    def step(self, number: int, optimizer: Any) -> Iterator[None]:
        """A context around a whole step: forward, backward and ``optimizer.step()``.

        Every rank of the world enters it for every step, or at least for the traced
        ones.

        Raises:
            RuntimeError: another profiler of torch is on in this process.
            OSError: the trace cannot be written.
        """
        if not self._has_begun:
            self._has_begun = True
            self._say_if_past(number)
        if number not in self._traces.steps:
            yield
            return
        if not self._has_place:
            self._has_place = True
            self._take_place()
        marks = {
            name: _marked(getattr(_ParamAndGradBucketGroup, name), mark)
            for name, mark in _MARKS.items()
        }
        facts = {
            "optimizer": optimizer.config.optimizer,
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
        }
        step = _marked(optimizer.step, OPTIMIZER)
        with (
            replaced(_ParamAndGradBucketGroup, **marks),
            self._traces.step(number, facts),
            replaced(optimizer, step=step),
        ):
            yield

    def _say_if_past(self, number: int) -> None:
        last = self._traces.steps[-1]
        if number > last:
            self._say(
                f"no step is traced: the last of them is {last}, and this run starts "
                f"at {number}"
            )

    def _take_place(self) -> None:
        """Have all ranks of the world write into one folder, where none has written
        before.
        """
        before = self._traces.runs_before()
        if dist.is_initialized():
            (before,) = max(all_gather_numbers([before], None, device_of([])))
        folder = self._traces.write_as(before + 1)
        if before:
            self._say(
                f"an earlier run's traces stay as they are: this run's are in {folder}"
            )

    def _say(self, line: str) -> None:
        if self._rank == 0:
            say(f"[megatron_muon] traces of steps: {line}")


def _marked(method: Callable[..., Any], mark: str) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(mark):
            return method(*args, **kwargs)

    return marked
