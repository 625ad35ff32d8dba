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


@dataclass(frozen=True)
class Race:
    """Two uses of a block that nothing orders."""

    # ``unordered``, two operations; ``freed``, the allocator may give the block away
    # while an operation uses it
    kind: Literal["unordered", "freed"]
    text: str


@dataclass
class _Access:
    time: int
    start: int
    stop: int
    write: bool
    operation: Operation


def races(trace: Trace, memory: Memory) -> list[Race]:
    """The races of a trace: the first one of each pair of operations on each block."""
    return _Replay(trace, memory).run()


class _Replay:
    def __init__(self, trace: Trace, memory: Memory) -> None:
        self._events = trace.events
        self._memory = memory
        self.shared = _on_several_streams(trace)
        # with how many on each stream must be done before it starts
        self.collectives: list[tuple[RecordedCollective, Clock]] = []
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
        self._races: dict[str, Race] = {}

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
        is_current = self._memory == "stash" and not event.asynchronous
        stream = event.stream if is_current else event.own_stream
        if stream != event.stream:
            self._join(self._clocks[stream], self._clocks[event.stream])
        self._operate(event, stream)
        clock = self._clocks[stream]
        self.collectives.append((event, {**clock, stream: clock[stream] - 1}))
        self._of_work[event.work] = dict(clock)
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
                if block in self.shared:
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
                    pair = f"{_said(access.operation)} and {_said(other.operation)}"
                    self._report("unordered", block, f"is used by {pair}, unordered")
                    break
        by_stream[stream].append(access)

    def _release(self, block: int) -> None:
        """Give a block back to the allocator, unless a work keeps it."""
        if self._kept[block]:
            return
        born = self._born.get(block)
        if born is None or block not in self.shared:
            return
        clock = dict(self._clocks[born.stream])
        self._join(clock, self._host)
        for stream, accesses in self._accesses.pop(block, {}).items():
            safe = stream == born.stream or stream in self._recorded[block]
            if not safe and clock.get(stream, 0) < accesses[-1].time:
                where = self._freed[block] or "no phase"
                user = _said(accesses[-1].operation)
                said = f"is freed in {where} while {user} may use it"
                self._report("freed", block, said)

    def _report(
        self, kind: Literal["unordered", "freed"], block: int, said: str
    ) -> None:
        born = self._born.get(block)
        place = None if born is None else born.place
        text = f"[{self._memory}] block {block} ({place}) {said}"
        self._races.setdefault(text, Race(kind, text))


def _said(operation: Operation) -> str:
    return f"{operation.name} in {operation.phase or 'no phase'} ({operation.place})"


def _on_several_streams(trace: Trace) -> set[int]:
    """Blocks that more than one stream touches; no other can be in a race."""
    streams: dict[int, set[str]] = defaultdict(set)
    for event in trace.events:
        if isinstance(event, Allocation):
            streams[event.block].add(event.stream)
        elif isinstance(event, (Kernel, RecordedCollective)):
            names = {event.stream, getattr(event, "own_stream", event.stream)}
            for block, _, _ in (*event.reads, *event.writes):
                streams[block] |= names
    return {block for block, names in streams.items() if len(names) > 1}


def collectives_and_clocks(trace: Trace) -> list[tuple[RecordedCollective, Clock]]:
    """Each collective, and how many on each of NCCL's streams must be done before it
    starts.

    Streams of the program are in the clocks too; only collectives run on NCCL's.
    """
    replay = _Replay(trace, "caller")
    replay.shared.clear()  # no accesses
    replay.run()
    return replay.collectives
