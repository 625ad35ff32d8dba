"""One rank's trace, read once: what a report needs, as sets of moments.

On a GPU compute is its kernels and copies, and communication is NCCL's kernels. On a
CPU compute is torch's operators, and communication is gloo's own events: from when it
takes a collective up until the collective has ended.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_muon.console import printable
from megatron_muon.lab.trace.collectives import COMMS, Call, call, is_nccl
from megatron_muon.lab.trace.events import TraceError, read_trace
from megatron_muon.lab.trace.spans import Spans

STEP = "ProfilerStep#"  # torch's own mark, as schedules of torch.profiler write it
# The recorder's mark around Megatron's whole optimizer step.
_OPTIMIZER = "optimizer/step"
_OPTIMIZERS = ("Optimizer.step#", "muon/", "grads/norm", "params/gather")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_READ = (*_DEVICE, "gpu_user_annotation", "user_annotation", "cpu_op")
# An operator of these contains another one's time, or the wait for a collective.
_NO_WORK = ("c10d::", "autograd::", "profiler::")
# Annotations that say nothing about what a collective is for.
_NO_PLACE = (STEP, "Optimizer.", _OPTIMIZER, "trace/", "## ", "DistributedData")


class RankTrace:
    """One file's trace.

    ``steps`` are the intervals of the steps, or of the whole trace if it ``has_marks``
    of none. ``compute`` is when something is computed, ``calls`` are the collectives.
    ``optimizer`` is when the optimizer steps, None where nothing marks it. ``device``
    is ``gpu`` if the trace has kernels, else ``cpu``.

    Raises:
        TraceError: the file is no trace, is damaged, or has no events with a time.
    """

    def __init__(self, path: Path) -> None:
        self.file = read_trace(path)
        self._start, self._stop, self._has_device = math.inf, -math.inf, False
        self._host = Spans()
        self._device = Spans()
        self._kernels: list[Call] = []
        self._gloo: list[Call] = []
        self._launches: list[Call] = []
        self._marks: list[_Mark] = []
        # by whether it is marked on the device, and whether the mark is around the
        # whole step
        optimizer: dict[tuple[bool, bool], Spans] = defaultdict(Spans)
        for number, event in enumerate(self.file.events):
            try:
                if event.get("ph") == "X":
                    self._add(event, optimizer)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{path}: event {number}: {error}") from error
        if self._start > self._stop:
            raise TraceError(f"{path}: no event in it has a duration")
        ours = self.file.metadata.get("megatron_muon")
        self.device = "gpu" if self._has_device else "cpu"
        self.compute = self._device if self._has_device else self._host
        self.optimizer = optimizer[max(optimizer)] if optimizer else None
        self.steps = [(m.start, m.stop) for m in self._marks if m.name.startswith(STEP)]
        self.has_marks = bool(self.steps)
        self.steps = sorted(self.steps) or [(self._start, self._stop)]
        # kernels run after the host has left the step
        if self._has_device and ours is None:
            self.steps[-1] = (self.steps[-1][0], max(self._stop, self.steps[-1][0]))
        _place(self._launches, self._marks)
        self.calls = self._learned()

    def _add(
        self, event: dict[str, Any], optimizer: dict[tuple[bool, bool], Spans]
    ) -> None:
        category = event.get("cat")
        name = event.get("name")
        if not isinstance(category, str) or not isinstance(name, str):
            # torch's own rows without a category, such as the profiler's own span
            return
        category = category.lower()
        if category not in _READ:
            return
        start, length = event["ts"], event["dur"]
        args = event.get("args", {})
        if length < 0 or not isinstance(args, dict):
            raise ValueError(f"dur is {length}, args is {str(args)[:40]!r}")
        at = (start, start + length)
        self._start = min(self._start, start)
        self._stop = max(self._stop, start + length)
        thread = f"{event.get('pid')}/{event.get('tid')}"[:80]
        if category in _DEVICE:
            self._has_device = True
            if category == "kernel" and is_nccl(name):
                self._kernels.append(call(name, at, args, thread))
            else:
                self._device.add(*at)
        elif category.endswith("user_annotation"):
            is_host = category == "user_annotation"
            if name.startswith((_OPTIMIZER, *_OPTIMIZERS)):
                optimizer[not is_host, name.startswith(_OPTIMIZER)].add(*at)
            if name.startswith("gloo:"):
                self._gloo.append(call(name, at, args, thread))
            elif is_host and not name.startswith("nccl:"):
                self._marks.append(_Mark(printable(name[:80]), *at, thread))
        elif name.startswith("c10d::") or name == COMMS:
            self._launches.append(call(name, at, args, thread))
        elif "::" in name and not name.startswith(_NO_WORK):
            self._host.add(*at)

    def _learned(self) -> list[Call]:
        """The collectives, with what the operators that started them tell."""
        if self._has_device:
            # one with sizes replaces one without, and torch's own event an operator
            launches = sorted(
                self._launches, key=lambda c: (c.elements is not None, -c.is_operator)
            )
            by_id = {launch.external: launch for launch in launches if launch.external}
            for kernel in self._kernels:
                kernel.learn(by_id.get(kernel.external))
            return self._kernels
        if self._gloo:
            started_by = _assigned(self._gloo, self._launches)
            for event, launch in zip(self._gloo, started_by, strict=True):
                if launch is not None:
                    event.operation = launch.operation
                event.learn(launch)
            return self._gloo
        # no gloo, or a torch that does not mark it: what the host sees
        operators = [launch for launch in self._launches if launch.is_operator]
        for operator in operators:
            operator.learn(operator)
        return operators


class _Mark(NamedTuple):
    """An annotation on the host."""

    name: str
    start: float
    stop: float
    thread: str


def _place(launches: Sequence[Call], marks: Sequence[_Mark]) -> None:
    """Set each launch's place: the innermost annotation around it. Those of a thread
    nest.
    """
    around: dict[str, list[_Mark]] = defaultdict(list)
    named = [mark for mark in marks if not mark.name.startswith(_NO_PLACE)]
    both: list[_Mark | Call] = [*named, *launches]
    both.sort(key=lambda one: (one.start, isinstance(one, Call), -one.stop))
    for one in both:
        inside = around[one.thread]
        while inside and inside[-1].stop < one.start:
            inside.pop()
        if isinstance(one, _Mark):
            inside.append(one)
        elif inside:
            name = inside[-1].name
            one.place = name.removesuffix("/collective").removesuffix("/wait")


def _assigned(events: Sequence[Call], launches: Sequence[Call]) -> list[Call | None]:
    """The operator that started each of gloo's events, or None.

    gloo's threads take collectives up in the order in which they were started. So the
    first event of a kind after an operator is the operator's. It may belong to a
    neighbour of the same kind where two groups communicate at once.
    """
    waiting: dict[str, deque[Call]] = defaultdict(deque)
    for launch in sorted(launches, key=lambda launch: launch.start):
        # gloo has no reduce-scatter of its own: an all-reduce does the work
        if launch.is_operator:
            kind = launch.operation
            waiting["all_reduce" if kind == "reduce_scatter" else kind].append(launch)
    started: dict[int, Call] = {}
    for event in sorted(events, key=lambda event: (event.start, event.stop)):
        queue = waiting[event.operation]
        if queue and queue[0].start <= event.start:
            started[id(event)] = queue.popleft()
    return [started.get(id(event)) for event in events]
