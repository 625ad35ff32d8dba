"""Chrome traces of chosen steps, written by torch.profiler: one file for each rank."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_muon.version import __version__

# Marks in a trace, which ``megatron_muon.lab.trace`` reads. Steps have torch's own name
# of a step.
STEP, OPTIMIZER = "ProfilerStep#", "optimizer/step"
_STEPS = re.compile(r"(\d{1,12})(?::(\d{1,12}))?")
_RUN = re.compile(r"run(\d{1,9})")


def chosen_steps(text: str) -> range:
    """The steps that ``FIRST:LAST`` names, both included; ``N`` is ``N:N``.

    Raises:
        ValueError: the text has another form, or names no step.
    """
    match = _STEPS.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"steps to trace must be FIRST:LAST or one number, from 1, got {text!r}"
        )
    return range(first, last + 1)


class StepTraces:
    """Traces steps of a run: ``with traces.step(number): …`` around each step, on every
    rank.

    The trace of a rank is ``rankN.json.gz`` in the folder, or after ``write_as`` in
    ``runK`` within it, with the marks of its steps. On a GPU each traced step ends with
    a wait for its kernels, so that the kernels of a step are in it.

    Args:
        steps: see ``chosen_steps``; the first is 1, as in a log.
        folder: the folder of the traces, which is made.
        rank: this rank in the world.

    Raises:
        ValueError: ``steps`` has another form.
        OSError: the folder cannot be made.
    """

    def __init__(self, steps: str, folder: Path, rank: int) -> None:
        self.steps = chosen_steps(steps)
        self.file = folder / f"rank{rank}.json.gz"
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._profiler: profile | None = None
        self._first = self.steps[0]

    def runs_before(self) -> int:
        """The number of the last run that has left a trace of this rank; 0 for none.

        Run 1 writes into the folder itself, run K into ``runK`` within it.
        """
        name = self.file.name
        named = (
            _RUN.fullmatch(file.parent.name)
            for file in self._folder.glob(f"run*/{name}")
        )
        numbers = [int(match[1]) for match in named if match]
        return max(numbers, default=int((self._folder / name).exists()))

    def write_as(self, run: int) -> Path:
        """Write as the folder's run of this number, the same on all ranks; returns its
        folder.

        Raises:
            OSError: the run's folder cannot be made.
        """
        folder = self._folder if run == 1 else self._folder / f"run{run}"
        folder.mkdir(exist_ok=True)
        self.file = folder / self.file.name
        return folder

    @contextmanager
    def step(
        self, number: int, facts: Mapping[str, Any] | None = None
    ) -> Iterator[bool]:
        """A context around a step; its value is whether the step is traced.

        All ranks enter it for the same steps. After the last one, the trace is written,
        with ``facts`` under ``megatron_muon``.

        Raises:
            RuntimeError: another profiler of torch is on in this process.
            OSError: the trace cannot be written.
        """
        if number not in self.steps:
            yield False
            return
        if self._profiler is None:
            self._first = number  # a run may restart within the chosen steps
            self._start()
        try:
            _wait_for_gpu()
            with record_function(f"{STEP}{number}"):
                yield True
                _wait_for_gpu()
        except BaseException:
            self._stop()
            # nothing is written, nor traced after it: a step would lack
            self.steps = range(0)
            raise
        if number == self.steps[-1]:
            self._write(dict(facts or {}))

    @property
    def is_open(self) -> bool:
        """Whether steps have been traced and the last one has not come."""
        return self._profiler is not None

    def _start(self) -> None:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            raise RuntimeError(
                "another profiler of torch is on: leave out --use-pytorch-profiler or "
                "the --muon-trace-steps flag"
            )
        on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
        # gloo's events have no sizes but those of recorded shapes; NCCL's have their
        # own
        self._profiler = profile(activities=activities, record_shapes=not on_gpu)
        self._profiler.start()

    def _stop(self) -> profile | None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        return profiler

    def _write(self, facts: dict[str, Any]) -> None:
        assert self._profiler is not None
        facts |= {"version": __version__, "host": socket.gethostname()}
        facts |= {"steps": [self._first, self.steps[-1]]}
        self._profiler.add_metadata_json("megatron_muon", json.dumps(facts))
        profiler = self._stop()
        assert profiler is not None
        # torch compresses what ends in .gz
        part = self.file.with_name(f".{self.file.name}")
        profiler.export_chrome_trace(str(part))
        os.replace(part, self.file)


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
