"""Chrome traces of chosen steps by torch.profiler: one file for each rank.

Besides the phases of Muon's step, Megatron's own communication and its whole optimizer
step are marked.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_muon.console import say
from megatron_muon.mcore.host.shards import device_of
from megatron_muon.mcore.seams.optimizer import SYNCS
from megatron_muon.mcore.seams.rows import check_rows
from megatron_muon.runtime.collectives import all_gather_numbers
from megatron_muon.runtime.patches import Function, replaced
from megatron_muon.version import __version__

# Marks in a trace, which ``megatron_muon.lab.trace`` reads. Steps have torch's own name
# of a step.
STEP = "ProfilerStep#"
OPTIMIZER = "optimizer/step"
# Megatron's methods that communicate, and their marks.
_COMMUNICATES = {
    "start_grad_sync": "grads/reduce",
    "finish_grad_sync": "grads/reduce",
    "start_param_sync": "params/gather",
    "finish_param_sync": "params/gather",
}
_STEPS = re.compile(r"(\d{1,12})(?::(\d{1,12}))?")
_RUN = re.compile(r"run(\d{1,9})")


def chosen_steps(text: str) -> range:
    """The steps that ``FIRST:LAST`` names, both included; ``N`` is ``N:N``.

    Raises:
        ValueError: the text has another form, or names no step.
    """
    match = _STEPS.fullmatch(text)
    if match is not None:
        first = int(match[1])
        last = int(match[2] or match[1])
        if 1 <= first <= last:
            return range(first, last + 1)
    raise ValueError(
        f"steps to trace must be FIRST:LAST or one number, from 1, got {text!r}"
    )


class MegatronTraces:
    """Traces steps of a run with megatron-core; see ``megatron_muon.step_traces``.

    The trace of a rank is ``rankN.json.gz`` in the folder, or where an earlier run has
    left one there, in ``runK`` within it. On a GPU each traced step begins and ends
    with a wait for the GPU, so that the kernels of a step are in it.
    """

    def __init__(self, steps: str, folder: str | Path) -> None:
        check_rows(SYNCS)
        self._steps = chosen_steps(steps)
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._profiler: profile | None = None
        self._file: Path | None = None
        self._first_traced = 0  # a run may restart within the chosen steps
        self._latest = 0  # step that has begun; 0 before the first

    @property
    def is_open(self) -> bool:
        """Whether the run has not come to the last of the steps, if it began before
        them or within.
        """
        is_early = self._latest in range(1, min(self._steps, default=0))
        return self._profiler is not None or is_early

    @contextmanager
    def step(self, number: int, optimizer: Any) -> Iterator[None]:
        """A context around a whole step: forward, backward and ``optimizer.step()``.

        Every rank of the world enters it for every step, or at least for the traced
        ones. After the last of these the trace is written.

        Raises:
            RuntimeError: another profiler of torch is on in this process.
            OSError: the trace cannot be written.
        """
        last = self._steps[-1] if self._steps else number
        if self._latest == 0 and number > last:
            self._say(
                f"no step is traced: the last of them is {last}, and this run starts "
                f"at {number}"
            )
        self._latest = number
        if number not in self._steps:
            yield
            return
        if self._file is None:
            self._file = self._folder_of_run() / f"rank{self._rank}.json.gz"
        if self._profiler is None:
            self._first_traced = number
            self._profiler = _started_profiler()
        try:
            _wait_for_gpu()
            with record_function(f"{STEP}{number}"), _marked_calls(optimizer):
                yield
                _wait_for_gpu()
        except BaseException:
            self._profiler.stop()
            self._profiler = None
            # nothing is written or traced from here on, since this step is incomplete
            self._steps = range(0)
            raise
        if number == last:
            self._write(self._profiler, self._file, optimizer)
            self._profiler = None

    def _folder_of_run(self) -> Path:
        """The folder of this run, the same on all ranks of the world: none has written
        a trace there.
        """
        before = self._runs_before()
        if dist.is_initialized():
            (before,) = max(all_gather_numbers([before], None, device_of([])))
        if before == 0:
            return self._folder
        folder = self._folder / f"run{before + 1}"
        folder.mkdir(exist_ok=True)
        self._say(
            f"an earlier run's traces stay as they are: this run's are in {folder}"
        )
        return folder

    def _runs_before(self) -> int:
        """The number of the last run that has left a trace of this rank; 0 for none."""
        name = f"rank{self._rank}.json.gz"
        last = int((self._folder / name).exists())  # run 1 writes into the folder
        for file in self._folder.glob(f"run*/{name}"):
            run = _RUN.fullmatch(file.parent.name)
            if run is not None:
                last = max(last, int(run[1]))
        return last

    def _write(self, profiler: profile, file: Path, optimizer: Any) -> None:
        facts = {
            "optimizer": optimizer.config.optimizer,
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
            "version": __version__,
            "host": socket.gethostname(),
            "steps": [self._first_traced, self._steps[-1]],
        }
        profiler.add_metadata_json("megatron_muon", json.dumps(facts))
        profiler.stop()
        part = file.with_name(f".{file.name}")
        profiler.export_chrome_trace(str(part))  # torch compresses what ends in .gz
        os.replace(part, file)

    def _say(self, line: str) -> None:
        if self._rank == 0:
            say(f"[megatron_muon] traces of steps: {line}")


def _started_profiler() -> profile:
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        raise RuntimeError(
            "another profiler of torch is on: use only one of --use-pytorch-profiler "
            "and --muon-trace-steps"
        )
    activities = [ProfilerActivity.CPU]
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    # gloo's events have the sizes of recorded shapes only; NCCL's have their own
    profiler = profile(activities=activities, record_shapes=not on_gpu)
    profiler.start()
    return profiler


@contextmanager
def _marked_calls(optimizer: Any) -> Iterator[None]:
    """A context in which traces show Megatron's communication and optimizer step."""
    marked = {
        name: _marked(getattr(_ParamAndGradBucketGroup, name), mark)
        for name, mark in _COMMUNICATES.items()
    }
    step = _marked(optimizer.step, OPTIMIZER)
    with replaced(_ParamAndGradBucketGroup, **marked), replaced(optimizer, step=step):
        yield


def _marked(method: Function, mark: str) -> Function:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(mark):
            return method(*args, **kwargs)

    return marked


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
