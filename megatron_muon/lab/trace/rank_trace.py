"""One rank's trace, read once: what a report needs, as sets of moments.

On a GPU compute is its kernels and copies, and communication is NCCL's kernels. On a
CPU compute is torch's operators, and communication is gloo's own events: from when it
takes a collective up until the collective has ended.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_muon.console import printable
from megatron_muon.lab.trace.collectives import Call, call
from megatron_muon.lab.trace.events import TraceError, read_trace
from megatron_muon.lab.trace.spans import Interval, union

STEP = "ProfilerStep#"  # torch's own mark, as schedules of torch.profiler write it
OPTIMIZER = "optimizer/step"  # the plugin's mark of Megatron's whole step
_TORCHS = "Optimizer.step#"  # of any optimizer
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_READ = (*_DEVICE, "gpu_user_annotation", "user_annotation", "cpu_op")
# An operator of these contains another one's time, or the wait for a collective.
_NO_WORK = ("c10d::", "autograd::", "profiler::")
# Annotations that say nothing about what a collective is for.
_NO_PLACE = (STEP, OPTIMIZER, "Optimizer.", "## ", "DistributedData", "nccl:")


class _Mark(NamedTuple):
    """An annotation on the host."""

    name: str
    at: Interval
    thread: str


class RankTrace:
    """One file's trace.

    ``steps`` are the intervals of the steps, or of the whole trace if it ``has_marks``
    of none. ``compute`` is when something is computed, ``calls`` are the collectives.
    ``optimizer`` is when the optimizer steps, empty where nothing marks it. ``device``
    is ``gpu`` if the trace has kernels, else ``cpu``.

    Raises:
        TraceError: the file is no trace, is damaged, or has no events with a time.
    """

    def __init__(self, path: Path) -> None:
        trace = read_trace(path)
        self.rank = trace.rank()
        self._times: defaultdict[str, list[Interval]] = defaultdict(list)
        self._calls: defaultdict[str, list[Call]] = defaultdict(list)
        self._marks: list[_Mark] = []
        for number, event in enumerate(trace.events):
            try:
                self._add(event)
            except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
                raise TraceError(f"{path}: event {number}: {error}") from error
        whole = union(self._times["all"])
        if not len(whole):
            raise TraceError(f"{path}: no event in it has a duration")
        is_gpu = bool(self._times["gpu"] or self._calls["nccl"])
        self.device = "gpu" if is_gpu else "cpu"
        self.compute = union(self._times[self.device])
        self.optimizer = union(
            self._times[OPTIMIZER] or self._marked(OPTIMIZER) or self._marked(_TORCHS)
        )
        self.steps = self._marked(STEP)
        self.has_marks = bool(self.steps)
        if not self.has_marks:
            self.steps = [(whole[0], whole[-1])]
        elif is_gpu:  # kernels run after the host has left the step
            self.steps[-1] = (self.steps[-1][0], whole[-1])
        self._launches = [*self._calls["c10d"], *self._calls["record_param_comms"]]
        self._launches.sort(key=lambda launch: launch.at)
        self._place_launches()
        if is_gpu:
            self.calls = self._calls["nccl"]
            places = {launch.external: launch.place for launch in self._launches}
            for kernel in self.calls:
                kernel.place = places.get(kernel.external) or kernel.place
        else:
            self.calls = list(self._gloos_calls())

    def _marked(self, name: str) -> list[Interval]:
        return sorted(mark.at for mark in self._marks if mark.name.startswith(name))

    def _add(self, event: Any) -> None:
        if not isinstance(event, dict):
            raise ValueError(f"it is no object but {str(event)[:40]!r}")
        category = event.get("cat")
        name = event.get("name")
        args = event.get("args", {})
        if event.get("ph") != "X":
            return
        start = _number(event, "ts", -1e18)
        at = (start, start + _number(event, "dur", 0))
        if category not in _READ or not isinstance(name, str):
            return
        if not isinstance(args, dict):
            raise ValueError(f"args is {str(args)[:40]!r}")
        self._times["all"].append(at)
        thread = f"{event.get('pid')}/{event.get('tid')}"[:80]
        if category == "kernel" and name[:4].lower() == "nccl":
            self._calls["nccl"].append(call(name, at, args, thread))
        elif category in _DEVICE:
            self._times["gpu"].append(at)
        elif category == "user_annotation" and name.startswith("gloo:"):
            self._calls["gloo"].append(call(name, at, args, thread))
        elif category == "user_annotation":
            self._marks.append(_Mark(printable(name[:80]), at, thread))
        elif category == "gpu_user_annotation":
            if name.startswith(OPTIMIZER):
                self._times[OPTIMIZER].append(at)
        elif name.startswith("c10d::") or name == "record_param_comms":
            # the latter is torch's event about a collective, which NCCL's kernels name
            self._calls[name.split(":")[0]].append(call(name, at, args, thread))
        elif "::" in name and not name.startswith(_NO_WORK):
            self._times["cpu"].append(at)

    def _place_launches(self) -> None:
        """Set each launch's place: the innermost annotation around it, as those of a
        thread nest.
        """
        marks = deque(sorted(self._marks, key=lambda mark: mark.at[0]))
        around: dict[str, list[_Mark]] = defaultdict(list)
        for launch in self._launches:
            while marks and marks[0].at[0] <= launch.at[0]:
                mark = marks.popleft()
                if not mark.name.startswith(_NO_PLACE):
                    around[mark.thread].append(mark)
            inside = around[launch.thread]
            inside[:] = [mark for mark in inside if mark.at[1] >= launch.at[0]]
            if inside:
                name = inside[-1].name
                launch.place = name.removesuffix("/collective").removesuffix("/wait")

    def _gloos_calls(self) -> Iterator[Call]:
        """gloo's events, as the operators that started them: an event by itself has a
        rank's part of the buffer.

        gloo's threads take collectives up in the order in which they were started. So
        the first event of a kind after an operator is the operator's. It may belong to
        a neighbour of the same kind where two groups communicate at once.
        """
        waiting: dict[str, deque[Call]] = defaultdict(deque)
        for launch in sorted(self._calls["c10d"], key=lambda launch: launch.at):
            # gloo has no reduce-scatter of its own: an all-reduce does the work
            kind = launch.operation.replace("reduce_scatter", "all_reduce")
            waiting[kind].append(launch)
        for event in sorted(self._calls["gloo"], key=lambda event: event.at):
            started = waiting[event.operation]
            if started and started[0].at[0] <= event.at[0]:
                event = replace(started.popleft(), at=event.at, dtype=event.dtype)
            yield event


def _number(event: dict[str, Any], key: str, least: float) -> float:
    value: Any = event.get(key)
    if type(value) not in (int, float) or not least <= value < 1e18:
        raise ValueError(f"{key} is {str(value)[:40]!r}")
    return float(value)
