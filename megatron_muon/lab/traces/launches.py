"""The start of a collective: the operator on the host, and the annotation around it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.lab.traces import names
from megatron_muon.lab.traces.intervals import Interval

# Annotations that say nothing about what a collective is for.
_NO_PLACE = ("ProfilerStep#", "Optimizer.", "optimizer/step", "trace/", "## ", "DistributedData")
_ENDS = ("/collective", "/wait")  # of the names of this package's own collectives


@dataclass(frozen=True, slots=True)
class Annotation:
    """An annotation: its name, interval and thread."""

    name: str
    interval: Interval
    thread: str


@dataclass(slots=True)
class Launch:
    """An operator that started a collective.

    Attributes:
        operation: such as ``all_gather``.
        interval: of the operator on the host.
        args: its arguments in the trace.
        thread: its thread.
        is_operator: whether it is a ``c10d::`` operator, and not torch's ``record_param_comms``.
        place: the innermost annotation around it, without ``/collective``, or "".
    """

    operation: str
    interval: Interval
    args: dict[str, Any]
    thread: str
    is_operator: bool
    place: str = ""

    @staticmethod
    def of(name: str, interval: Interval, args: dict[str, Any], thread: str) -> Launch:
        is_operator = name.startswith("c10d::")
        said = name if is_operator else str(args.get("Collective name", ""))
        kept = {key: args[key] for key in _KEPT if key in args}
        operation = names.operation(said.removeprefix("c10d::")) or said[:40]
        return Launch(operation, interval, kept, thread, is_operator)

    @property
    def external(self) -> int | None:
        """The number that it shares with the kernels that it launched."""
        return external_id(self.args)

    @property
    def has_sizes(self) -> bool:
        return "In msg nelems" in self.args


_KEPT = (
    *("External id", "In msg nelems", "Out msg nelems", "dtype", "Group size"),
    *("Process Group Description", "Input Dims", "Input type"),
)


def external_id(args: dict[str, Any]) -> int | None:
    """The number that an operator and its kernels share, in their arguments; None without one."""
    value = args.get("External id")
    return value if isinstance(value, int) and value else None


def annotate(launches: Sequence[Launch], spans: Sequence[Annotation]) -> None:
    """Set the place of each launch. Annotations of a thread nest."""
    by_thread: dict[str, list[Annotation]] = defaultdict(list)
    for span in spans:
        if not span.name.startswith(_NO_PLACE):
            by_thread[span.thread].append(span)
    for own in by_thread.values():
        own.sort(key=lambda span: (span.interval[0], -span.interval[1]))
    mine: dict[str, list[Launch]] = defaultdict(list)
    for launch in launches:
        mine[launch.thread].append(launch)
    for thread, started in mine.items():
        _annotate(sorted(started, key=lambda launch: launch.interval), by_thread[thread])


def _annotate(launches: Sequence[Launch], spans: Sequence[Annotation]) -> None:
    inside: list[Annotation] = []
    coming = deque(spans)
    for launch in launches:
        start = launch.interval[0]
        while coming and coming[0].interval[0] <= start:
            inside.append(coming.popleft())
            inside = [span for span in inside if span.interval[1] >= inside[-1].interval[0]]
        inside = [span for span in inside if span.interval[1] >= start]
        if inside:
            launch.place = _plain(inside[-1].name)


def _plain(name: str) -> str:
    for end in _ENDS:
        name = name.removesuffix(end)
    return name


def assign(
    events: Sequence[tuple[str, Interval]], launches: Sequence[Launch]
) -> list[Launch | None]:
    """The operator that started each of gloo's events, or None.

    gloo's threads take collectives up in the order in which they were started. So the first event
    of a kind after an operator is the operator's. It may belong to a neighbour of the same kind
    where two groups communicate at once.
    """
    waiting: dict[str, deque[Launch]] = defaultdict(deque)
    for launch in sorted(launches, key=lambda launch: launch.interval):
        if launch.is_operator:
            waiting[names.backends_operation(launch.operation)].append(launch)
    by_event: list[Launch | None] = [None] * len(events)
    for at in sorted(range(len(events)), key=lambda at: events[at][1]):
        said, (start, _) = events[at]
        queue = waiting[said]
        if queue and queue[0].interval[0] <= start:
            by_event[at] = queue.popleft()
    return by_event
