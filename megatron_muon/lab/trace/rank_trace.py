"""One rank's trace, read once: what a report needs, as sets of moments.

On a GPU compute is its kernels and copies, and communication is NCCL's kernels. On a
CPU compute is torch's operators, and communication is gloo's own events: from when it
takes a collective up until the collective has ended.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_muon.console import printable
from megatron_muon.lab.trace.collectives import Call, call
from megatron_muon.lab.trace.events import TraceError, read_trace
from megatron_muon.lab.trace.spans import Edges, Interval, common, length, union

STEP = "ProfilerStep#"  # torch's own mark, as schedules of torch.profiler write it
OPTIMIZER = "optimizer/step"  # the plugin's mark of Megatron's whole step
_TORCHS = "Optimizer.step#"  # of any optimizer
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# An operator of these contains another one's time.
_NO_WORK = ("autograd::", "profiler::")
# Kinds of events: those on the device, and what starts one on the host.
# "record_param_comms" is torch's event about a collective, which NCCL's kernels name.
_COLLECTIVES = ("nccl", "gloo", "c10d", "record_param_comms")
# Annotations that say nothing about what a collective is for.
_NO_PLACE = (STEP, OPTIMIZER, "Optimizer.", "## ", "DistributedData", "nccl:")


class _Mark(NamedTuple):
    """An annotation on the host."""

    name: str
    at: Interval
    thread: str


class RankTrace:
    """One file's trace.

    Attributes:
        rank: its number, if the trace tells it.
        device: ``gpu`` if the trace has kernels, else ``cpu``.
        marked: number of the steps that are marked.
        steps: when they are; without marks the whole trace is one.
        compute: when something is computed in them.
        optimizer: when the optimizer steps in them, empty where nothing marks it.
        calls: the collectives.

    Raises:
        TraceError: the file is no trace, is damaged, or has no events with a time.
    """

    def __init__(self, path: Path) -> None:
        events, self.rank = read_trace(path)
        self._times: defaultdict[str, list[Interval]] = defaultdict(list)
        self._calls: defaultdict[str, list[Call]] = defaultdict(list)
        self._marks: list[_Mark] = []
        for number, event in enumerate(events):
            try:
                self._add(event)
            except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
                raise TraceError(f"{path}: event {number}: {error}") from error
        whole = union(itertools.chain(*self._times.values()))
        if not len(whole):
            raise TraceError(f"{path}: no event in it has a duration")
        is_gpu = bool(self._times["gpu"] or self._times["nccl"])
        self.device = "gpu" if is_gpu else "cpu"
        steps = self._marked(STEP)
        self.marked = len(steps)
        if not steps:
            steps = [(whole[0], whole[-1])]
        elif is_gpu:  # kernels run after the host has left the step
            steps.append((steps[-1][0], whole[-1]))
        self.steps = union(steps)
        self.compute = common(union(self._times[self.device]), self.steps)
        marks = self._marked(OPTIMIZER) or self._marked(_TORCHS)
        self.optimizer = common(union(self._times["optimizer"] or marks), self.steps)
        for calls in self._calls.values():
            calls.sort(key=lambda call: call.at)
        launches = [*self._calls["c10d"], *self._calls["record_param_comms"]]
        self._place(launches)
        if is_gpu:
            self.calls = self._calls["nccl"]
            places = {launch.external: launch.place for launch in launches}
            for kernel in self.calls:
                kernel.place = places.get(kernel.external) or kernel.place
        else:
            self.calls = list(self._gloos_calls())

    def exposed(self, edges: Edges) -> float:
        """Microseconds of a set in which nothing is computed."""
        return length(edges) - length(common(edges, self.compute))

    def _marked(self, name: str) -> list[Interval]:
        return sorted(mark.at for mark in self._marks if mark.name.startswith(name))

    def _add(self, event: Any) -> None:
        if not isinstance(event, dict):
            raise ValueError(f"it is no object but {str(event)[:40]!r}")
        if event.get("ph") != "X":
            return
        start = _number(event, "ts", -1e18)
        at = (start, start + _number(event, "dur", 0))
        name = str(event.get("name"))
        kind = _kind(event.get("cat"), name)
        if kind is None:
            return
        args = event.get("args", {})
        if not isinstance(args, dict):
            raise ValueError(f"args is {str(args)[:40]!r}")
        self._times[kind].append(at)
        thread = f"{event.get('pid')}/{event.get('tid')}"[:80]
        if kind == "mark":
            self._marks.append(_Mark(printable(name[:80]), at, thread))
        elif kind in _COLLECTIVES:
            self._calls[kind].append(call(name, at, args, thread))

    def _place(self, launches: list[Call]) -> None:
        """Set each launch's place: the innermost annotation around it, as those of a
        thread nest.
        """
        marks = [mark for mark in self._marks if not mark.name.startswith(_NO_PLACE)]
        around: dict[str, list[_Mark]] = defaultdict(list)
        timeline: list[_Mark | Call] = [*marks, *launches]
        for event in sorted(timeline, key=lambda event: event.at[0]):
            inside = around[event.thread]
            if isinstance(event, _Mark):
                inside.append(event)
                continue
            inside[:] = [mark for mark in inside if mark.at[1] >= event.at[0]]
            if inside:
                name = inside[-1].name
                event.place = name.removesuffix("/collective").removesuffix("/wait")

    def _gloos_calls(self) -> Iterator[Call]:
        """gloo's events, as the operators that started them: an event by itself has a
        rank's part of the buffer.

        gloo's threads take collectives up in the order in which they were started. So
        the first event of a kind after an operator is the operator's. It may belong to
        a neighbour of the same kind where two groups communicate at once.
        """
        waiting: dict[str, deque[Call]] = defaultdict(deque)
        for launch in self._calls["c10d"]:
            # gloo has no reduce-scatter of its own: an all-reduce does the work
            kind = launch.operation.replace("reduce_scatter", "all_reduce")
            waiting[kind].append(launch)
        for event in self._calls["gloo"]:
            started = waiting[event.operation]
            if started and started[0].at[0] <= event.at[0]:
                event = replace(started.popleft(), at=event.at, dtype=event.dtype)
            yield event


def _kind(category: object, name: str) -> str | None:
    """What a report takes an event for: "" where it only needs its time, None where it
    does not read it.
    """
    if category in _DEVICE:
        is_nccl = category == "kernel" and name[:4].lower() == "nccl"
        return "nccl" if is_nccl else "gpu"
    if category == "user_annotation":
        return "gloo" if name.startswith("gloo:") else "mark"
    if category == "gpu_user_annotation":
        return "optimizer" if name.startswith(OPTIMIZER) else ""
    if category != "cpu_op":
        return None
    start, colons, _ = name.partition("::")
    if start in ("c10d", "record_param_comms"):
        return start
    return "cpu" if colons and not name.startswith(_NO_WORK) else ""


def _number(event: dict[str, Any], key: str, least: float) -> float:
    value: Any = event.get(key)
    if type(value) not in (int, float) or not least <= value < 1e18:
        raise ValueError(f"{key} is {str(value)[:40]!r}")
    return float(value)
