"""One rank's trace, read once: what a report and a figure need, as intervals.

On a GPU compute is its kernels and copies, and communication is NCCL's kernels. On a CPU compute is
torch's operators, and communication is gloo's own events: from when it takes a collective up until
the collective has ended.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_muon.lab.traces import names
from megatron_muon.lab.traces.intervals import Interval, Union, union
from megatron_muon.lab.traces.launches import Annotation, Launch, annotate, assign, external_id
from megatron_muon.lab.traces.stream import TraceError, TraceFile

OPTIMIZER = "optimizer/step"  # the recorder's own mark around Megatron's whole optimizer step
STEP = "ProfilerStep#"  # torch's own mark, as schedules of torch.profiler write it
_OPTIMIZERS = ("Optimizer.step#", "muon/", "grads/norm", "params/gather")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# An operator of these has another one's time inside it, or the wait for a collective.
_NO_WORK = ("c10d::", "autograd::", "profiler::")
_MOST_MARKS = 4_000_000  # collectives and annotations of a file, which stay in memory


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on a rank.

    Attributes:
        operation: such as ``all_gather``.
        start, stop: microseconds of the trace.
        dtype: short name of the elements' dtype, or "".
        bytes: bytes of the whole buffer, or None where the trace does not tell.
        ranks: ranks of its group, or None.
        place: the annotation that it was started in, or its group's description, or "".
    """

    operation: str
    start: float
    stop: float
    dtype: str
    bytes: int | None
    ranks: int | None
    place: str


@dataclass
class RankTrace:
    """One file's trace, as the report needs it.

    Attributes:
        path: the file.
        device: where the work was: ``gpu`` if the trace has kernels.
        steps: (number, interval) of each step; without marks (None, the whole trace).
        compute: disjoint intervals.
        collectives: in order of their starts.
        optimizer: disjoint intervals of the optimizer; None where nothing marks it.
        phases: (name, interval) of the annotations, in order, for a picture.
        metadata: the trace's values outside its events.
    """

    path: Path
    device: Literal["cpu", "gpu"]
    steps: list[tuple[int | None, Interval]]
    compute: Union
    collectives: list[Collective]
    optimizer: Union | None
    phases: list[tuple[str, Interval]]
    metadata: dict[str, Any]


def read(path: Path) -> RankTrace:
    """Read a file.

    Raises:
        TraceError: it is no trace, is damaged, or has no events with a time; names the file.
    """
    file = TraceFile(path)
    reading = _Reading()
    for number, event in enumerate(file.events()):
        if event.get("ph") != "X":
            continue
        try:
            reading.add(event)
        except ValueError as error:
            raise TraceError(f"{path}: event {number}: {error}") from error
    if reading.start > reading.stop:
        raise TraceError(f"{path}: no event in it has a duration")
    own = file.metadata.get("megatron_muon")
    if isinstance(own, dict) and "clocks" in own:
        raise TraceError(
            f"{path}: it is merged from several ranks: give the folder of their traces"
        )
    return reading.result(path, file.metadata)


@dataclass
class _Reading:
    """The events that have been read so far."""

    start: float = math.inf
    stop: float = -math.inf
    host: Union = field(default_factory=Union)
    device: Union = field(default_factory=Union)
    has_device: bool = False
    kernels: list[tuple[str, Interval, dict[str, Any]]] = field(default_factory=list)
    gloo: list[tuple[str, Interval, dict[str, Any]]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    spans: list[Annotation] = field(default_factory=list)
    on_device: dict[str, Union] = field(default_factory=lambda: defaultdict(Union))

    def add(self, event: dict[str, Any]) -> None:
        """Take an event with a duration.

        Raises:
            ValueError: a value in it is of the wrong kind.
        """
        category, name = event.get("cat"), event.get("name")
        if not isinstance(category, str) or not isinstance(name, str):
            return  # torch's own rows without a category, such as the profiler's own span
        category = category.lower()
        if category not in _READ:
            return
        start = microseconds(event, "ts")
        stop = start + microseconds(event, "dur")
        if stop < start:
            raise ValueError(f"dur is {event['dur']!r}")
        args = event.get("args", {})
        if not isinstance(args, dict):
            raise ValueError(f"args is {str(args)[:40]!r}")
        self.start, self.stop = min(self.start, start), max(self.stop, stop)
        self._sort_in(category, name, (start, stop), args, event)
        if len(self.kernels) + len(self.gloo) + len(self.launches) + len(self.spans) > _MOST_MARKS:
            raise ValueError(f"there are more than {_MOST_MARKS} collectives and annotations")

    def _sort_in(
        self,
        category: str,
        name: str,
        interval: Interval,
        args: dict[str, Any],
        event: dict[str, Any],
    ) -> None:
        if category in _DEVICE:
            if not self.has_device:
                self.has_device, self.host = True, Union()  # the host's time is not needed
            said = names.nccl_operation(name) if category == "kernel" else None
            if said is None:
                self.device.add(*interval)
            else:
                self.kernels.append((said, interval, args))
        elif category == "gpu_user_annotation":
            self.on_device[name].add(*interval)
        elif category == "user_annotation":
            if name.startswith("gloo:"):
                self.gloo.append((names.operation(name[5:]) or name[5:], interval, args))
            elif not name.startswith("nccl:"):
                self.spans.append(Annotation(name, interval, _thread(event)))
        elif name.startswith("c10d::") or name == "record_param_comms":
            self.launches.append(Launch.of(name, interval, args, _thread(event)))
        elif not self.has_device and "::" in name and not name.startswith(_NO_WORK):
            self.host.add(*interval)

    def result(self, path: Path, metadata: dict[str, Any]) -> RankTrace:
        annotate(self.launches, self.spans)
        try:
            collectives = self._collectives()
        except ValueError as error:
            raise TraceError(f"{path}: a collective's arguments: {error}") from error
        return RankTrace(
            path=path,
            device="gpu" if self.has_device else "cpu",
            steps=self._steps("megatron_muon" in metadata),
            compute=self.device if self.has_device else self.host,
            collectives=sorted(collectives, key=lambda each: each.start),
            optimizer=self._optimizer(),
            phases=sorted(((s.name, s.interval) for s in self.spans), key=lambda each: each[1]),
            metadata=metadata,
        )

    def _collectives(self) -> list[Collective]:
        if self.has_device:
            by_id: dict[int, Launch] = {}
            for launch in sorted(self.launches, key=lambda each: each.has_sizes):
                if launch.external is not None:
                    by_id[launch.external] = launch  # one with sizes replaces one without
            return [
                _collective(said, interval, args, by_id.get(external_id(args) or 0))
                for said, interval, args in self.kernels
            ]
        if not self.gloo:  # no gloo, or a torch that does not mark it: what the host sees
            return [
                _collective(launch.operation, launch.interval, launch.args, launch)
                for launch in self.launches
                if launch.is_operator
            ]
        matched = assign([(said, at) for said, at, _ in self.gloo], self.launches)
        return [
            _collective(said if launch is None else launch.operation, at, args, launch)
            for (said, at, args), launch in zip(self.gloo, matched, strict=True)
        ]

    def _steps(self, is_ours: bool) -> list[tuple[int | None, Interval]]:
        marks: list[tuple[int | None, Interval]] = []
        for span in self.spans:
            text = span.name.removeprefix(STEP)
            if span.name.startswith(STEP) and text.isdecimal() and len(text) < 19:
                marks.append((int(text), span.interval))
        if not marks:
            return [(None, (self.start, self.stop))]
        marks.sort(key=lambda each: each[1])
        if self.has_device and not is_ours:  # kernels run after the host has left the step
            number, (start, _) = marks[-1]
            marks[-1] = (number, (start, max(self.stop, start)))
        return marks

    def _optimizer(self) -> Union | None:
        here: dict[str, Union] = defaultdict(Union)
        for span in self.spans:
            here[span.name].add(*span.interval)
        for marked in (self.on_device, here):
            for wanted in ((OPTIMIZER,), _OPTIMIZERS):
                chosen = [part for name, part in marked.items() if name.startswith(wanted)]
                if chosen:
                    return union(interval for part in chosen for interval in part)
        return None


_READ = {*_DEVICE, "gpu_user_annotation", "user_annotation", "cpu_op"}


def _collective(
    said: str, interval: Interval, args: dict[str, Any], launch: Launch | None
) -> Collective:
    told = args.get("Collective name")  # NCCL's kernels may be called Generic, or do several
    own = (names.operation(told) if isinstance(told, str) else None) or said
    if launch is not None and own in ("nccl", "send_recv"):
        own = launch.operation or own
    dtype, size = names.message(args)
    ranks, place = names.group_size(args), ""
    description = args.get("Process Group Description")
    if launch is not None:
        if size is None or launch.is_operator:  # gloo's own event has a rank's part only
            launched_dtype, launched = names.message(launch.args)
            dtype = dtype or launched_dtype
            size = _larger(size, launched, dtype, launch.args)
        ranks = ranks or names.group_size(launch.args)
        if ranks is None and own in ("all_gather", "reduce_scatter"):
            ranks = names.sizes_ratio(launch.args)
        description = description or launch.args.get("Process Group Description")
        place = launch.place
    if not place and isinstance(description, str):
        place = description
    return Collective(own, *interval, dtype, size, ranks, place)


def _larger(size: int | None, launched: int | None, dtype: str, args: dict[str, Any]) -> int | None:
    """The larger of a collective's size and its operator's.

    For a list of tensors the operator's arguments have no dtype, so the collective's counts.
    """
    if launched is None and dtype and size is not None:
        launched = names.message({**args, "Input type": [dtype_name(dtype)]})[1]
    return max((each for each in (size, launched) if each is not None), default=None)


def dtype_name(short: str) -> str:
    """A short name, spelled as ``names.dtype_of`` reads it."""
    return {"fp32": "float", "fp64": "double", "fp16": "half", "bf16": "bfloat16"}.get(short, short)


def _thread(event: dict[str, Any]) -> str:
    return f"{event.get('pid')}/{event.get('tid')}"[:80]


def microseconds(event: dict[str, Any], key: str) -> float:
    """A time of an event.

    Raises:
        ValueError: it is missing, no number or beyond all bounds.
    """
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:
        raise ValueError(f"{key} is {str(value)[:40]!r}")
    return float(value)
