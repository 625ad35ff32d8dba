"""Bytes that a rank's allocator has handed out, over a trace."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from support.virtual_gpu.trace import (
    Allocation,
    Free,
    HostSync,
    RecordedCollective,
    StepStart,
    Trace,
    WorkWait,
)

# wait: at ``Work.wait``, where torch or the caller keeps it until then, and where torch
# calls ``recordStream`` and the GPU keeps up with the host. host ahead: where torch
# calls it, which it does for point-to-point messages, once the host waits for the GPU.
# The last: the same, as if all messages were in memory of torch's allocator.
Way = Literal["wait", "host ahead", "host ahead, torch's memory"]


@dataclass(frozen=True)
class Peak:
    """The most memory that the last step takes."""

    # bytes at its start, by block: parameters, gradients, optimizer state
    state_blocks: dict[int, int]
    over_state: int  # most bytes above those at any time


def peak(trace: Trace, way: Way = "wait") -> Peak:
    """The peak if the allocator takes back what NCCL uses in one of these ways."""
    replay = _Replay(way)
    for event in trace.events:
        replay.take(event)
    return Peak(replay.state, replay.most)


class _Replay:
    def __init__(self, way: Way) -> None:
        self._way = way
        self._recorded: set[int] = set()  # blocks that the GPU may still use
        self.live: dict[int, int] = {}  # bytes by block
        self.bytes = self.base = self.most = 0
        self.state: dict[int, int] = {}
        self._kept: dict[int, int] = defaultdict(int)
        self._works: dict[int, list[int]] = {}
        self._freed: set[int] = set()

    def take(self, event: object) -> None:
        if isinstance(event, StepStart):
            self.base, self.most = self.bytes, 0
            self.state = dict(self.live)
        elif isinstance(event, Allocation):
            self.live[event.block] = event.nbytes
            self.bytes += event.nbytes
            self.most = max(self.most, self.bytes - self.base)
        elif isinstance(event, Free):
            self._freed.add(event.block)
            self._release(event.block)
        elif isinstance(event, RecordedCollective) and event.asynchronous:
            self._works[event.work] = [b for b, _, _ in (*event.reads, *event.writes)]
            for block in self._works[event.work]:
                self._kept[block] += 1
            if self._way == "host ahead":
                self._recorded |= event.recorded
            elif self._way == "host ahead, torch's memory" and event.point_to_point:
                self._recorded.update(self._works[event.work])
        elif isinstance(event, WorkWait):
            for block in self._works.pop(event.work, ()):
                self._kept[block] -= 1
                if block in self._freed:
                    self._release(block)
        elif isinstance(event, HostSync):
            freed, self._recorded = self._recorded & self._freed, set()
            for block in freed:
                self._release(block)

    def _release(self, block: int) -> None:
        if not self._kept[block] and block not in self._recorded and block in self.live:
            self.bytes -= self.live.pop(block)
