"""Happens-before over a trace: accesses that nothing orders, and memory freed while in
use.

Each stream has a vector clock. Work on a stream is ordered; an event, a ``Work`` and a
host synchronisation carry a clock from one stream to another. Two accesses to the same
bytes, one of them a write, race unless one's clock knows of the other. Ranges are from
a tensor's first to its last byte, so what lies in the gaps between a view's rows counts
as touched.

The caching allocator hands a freed block to the next kernel of the stream that it was
allocated on. Whether NCCL's use keeps it depends on the torch release, so a trace is
judged under each of ``MEMORY``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, get_args

from support.virtual_gpu.trace import (
    Allocation,
    EventRecord,
    Free,
    HostSync,
    Kernel,
    Place,
    Range,
    RecordedCollective,
    RecordStream,
    StreamWait,
    Trace,
    WorkWait,
)

# stash: torch 2.8 on keeps what a collective uses until Work.wait, and runs a
# synchronous one on the current stream. record_stream: before, the allocator waits for
# NCCL's stream. caller: nothing but the caller's references keep memory, as with
# TORCH_NCCL_AVOID_RECORD_STREAMS in some releases.
Memory = Literal["stash", "record_stream", "caller"]
MEMORY: tuple[Memory, ...] = get_args(Memory)

Clock = dict[str, int]
Operation = Kernel | RecordedCollective


@dataclass(frozen=True, slots=True)
class Race:
    """Two uses of a block that nothing orders."""

    # ``unordered``, two operations; ``freed``, the allocator may give the block away
    # while ``other`` uses it
    kind: Literal["unordered", "freed"]
    memory: Memory  # under which handling of collectives' memory
    block: int  # its number
    allocated: Place | None  # where it came from
    operation: str  # the later use; where it was freed, the phase
    other: str  # the earlier use
    phase: str  # of the later one

    def __str__(self) -> str:
        block = f"block {self.block} ({self.allocated})"
        if self.kind == "freed":
            where = self.phase or "no phase"
            return (
                f"[{self.memory}] {block} is freed in {where} while {self.other} "
                "may use it"
            )
        return (
            f"[{self.memory}] {self.operation} and {self.other} use {block}, unordered"
        )


@dataclass(slots=True)
class _Access:
    time: int
    start: int
    stop: int
    write: bool
    operation: Operation


def races(trace: Trace, memory: Memory) -> list[Race]:
    """The races of a trace: the first one of each pair of operations on each block."""
    return _Replay(trace, memory).run()


def launch_stream(operation: Operation, memory: Memory) -> str:
    """The stream that an operation runs on."""
    if isinstance(operation, Kernel):
        return operation.stream
    if memory == "stash" and not operation.asynchronous:
        return operation.stream
    return operation.own_stream


class _Replay:
    def __init__(self, trace: Trace, memory: Memory) -> None:
        self._events = trace.events
        self._memory = memory
        self._shared = _on_several_streams(trace)
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._host: Clock = {}
        self._of_event: dict[int, Clock] = {}
        self._of_work: dict[int, Clock] = {}
        self._stashed: dict[int, list[int]] = {}  # blocks by work
        self._kept: dict[int, int] = defaultdict(int)  # works that keep a block
        self._freed: dict[int, str] = {}  # by the program, not yet by the allocator
        self._recorded: dict[int, set[str]] = defaultdict(set)
        self._born: dict[int, Allocation] = {}
        self._accesses: dict[int, dict[str, list[_Access]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._races: dict[object, Race] = {}

    def run(self) -> list[Race]:
        for event in self._events:
            match event:
                case Kernel():
                    self._operate(event, event.stream)
                case RecordedCollective():
                    self._collective(event)
                case WorkWait():
                    self._join(self._clocks[event.stream], self._of_work[event.work])
                    self._unstash(event.work)
                case EventRecord():
                    self._of_event[event.event] = dict(self._clocks[event.stream])
                case StreamWait():
                    self._join(self._clocks[event.stream], self._of_event[event.event])
                case HostSync():
                    self._host_waits(event)
                case Allocation():
                    self._born[event.block] = event
                case RecordStream():
                    self._recorded[event.block].add(event.stream)
                case Free():
                    self._freed[event.block] = event.phase
                    self._release(event.block)
        return list(self._races.values())

    @staticmethod
    def _join(clock: Clock, other: Clock) -> None:
        for stream, time in other.items():
            if clock.get(stream, 0) < time:
                clock[stream] = time

    def _collective(self, event: RecordedCollective) -> None:
        stream = launch_stream(event, self._memory)
        if stream != event.stream:
            self._join(self._clocks[stream], self._clocks[event.stream])
        self._operate(event, stream)
        self._of_work[event.work] = dict(self._clocks[stream])
        blocks = [block for block, _, _ in (*event.reads, *event.writes)]
        if not event.asynchronous:
            self._join(self._clocks[event.stream], self._of_work[event.work])
        elif self._memory == "stash":
            self._stashed[event.work] = blocks
            for block in blocks:
                self._kept[block] += 1
        if self._memory == "record_stream":
            for block in blocks:
                self._recorded[block].add(stream)

    def _unstash(self, work: int) -> None:
        for block in self._stashed.pop(work, ()):
            self._kept[block] -= 1
            if block in self._freed:
                self._release(block)

    def _host_waits(self, event: HostSync) -> None:
        if event.event is not None:
            self._join(self._host, self._of_event[event.event])
            return
        streams = list(self._clocks) if event.stream is None else [event.stream]
        for stream in streams:
            self._join(self._host, self._clocks[stream])

    def _operate(self, operation: Operation, stream: str) -> None:
        clock = self._clocks[stream]
        self._join(clock, self._host)
        time = clock[stream] = clock.get(stream, 0) + 1
        for touched, write in ((operation.reads, False), (operation.writes, True)):
            for block, start, stop in touched:
                if block in self._shared:
                    access = _Access(time, start, stop, write, operation)
                    self._access(block, stream, clock, access)

    def _access(self, block: int, stream: str, clock: Clock, access: _Access) -> None:
        by_stream = self._accesses[block]
        for other_stream, others in by_stream.items():
            if other_stream == stream:
                continue
            known = clock.get(other_stream, 0)
            for other in reversed(others):
                if other.time <= known:
                    break  # and so are all before it
                conflict = access.write or other.write
                if conflict and other.start < access.stop and access.start < other.stop:
                    self._report("unordered", block, access.operation, other.operation)
                    break
        by_stream[stream].append(access)

    def _release(self, block: int) -> None:
        """Give a block back to the allocator, unless a work keeps it."""
        if self._kept[block]:
            return
        born = self._born.get(block)
        if born is None or block not in self._shared:
            return
        clock = dict(self._clocks[born.stream])
        self._join(clock, self._host)
        for stream, accesses in self._accesses.pop(block, {}).items():
            safe = stream == born.stream or stream in self._recorded[block]
            if not safe and clock.get(stream, 0) < accesses[-1].time:
                self._report("freed", block, None, accesses[-1].operation)

    def _report(
        self,
        kind: Literal["unordered", "freed"],
        block: int,
        operation: Operation | None,
        other: Operation,
    ) -> None:
        born = self._born.get(block)
        at = None if born is None else born.place
        phase = self._freed[block] if operation is None else operation.phase
        said = "" if operation is None else _said(operation)
        key = (kind, block, said, _said(other))
        self._races.setdefault(
            key, Race(kind, self._memory, block, at, said, _said(other), phase)
        )


def _said(operation: Operation) -> str:
    return f"{operation.name} in {operation.phase or 'no phase'} ({operation.place})"


def _on_several_streams(trace: Trace) -> set[int]:
    """Blocks that more than one stream touches; no other can be in a race."""
    streams: dict[int, set[str]] = defaultdict(set)

    def touch(operation: Operation, stream: str, touched: list[Range]) -> None:
        for block, _, _ in touched:
            streams[block].add(stream)

    for event in trace.events:
        if isinstance(event, Allocation):
            streams[event.block].add(event.stream)
        elif isinstance(event, Kernel):
            touch(event, event.stream, event.reads)
            touch(event, event.stream, event.writes)
        elif isinstance(event, RecordedCollective):
            for stream in (event.stream, event.own_stream):
                touch(event, stream, event.reads)
                touch(event, stream, event.writes)
    return {block for block, names in streams.items() if len(names) > 1}


def collectives_and_clocks(trace: Trace) -> list[tuple[RecordedCollective, Clock]]:
    """Each collective, and how many on each of NCCL's streams must be done before it
    starts.

    Streams of the program are in the clocks too; only collectives run on NCCL's.
    """
    return _Clocks(trace, "caller").run_clocks()


class _Clocks(_Replay):
    def run_clocks(self) -> list[tuple[RecordedCollective, Clock]]:
        self._shared = set()  # no accesses
        self._noted: list[tuple[RecordedCollective, Clock]] = []
        self.run()
        return self._noted

    def _operate(self, operation: Operation, stream: str) -> None:
        super()._operate(operation, stream)
        if isinstance(operation, RecordedCollective):
            before = dict(self._clocks[stream])
            before[stream] -= 1
            self._noted.append((operation, before))
