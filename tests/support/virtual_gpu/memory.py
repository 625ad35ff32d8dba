"""Bytes that a rank's allocator has handed out, over a trace."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from support.virtual_gpu.trace import (
    Allocation,
    Free,
    HostSync,
    Kernel,
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


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that the last step takes."""

    state: int  # bytes at its start: parameters, gradients, optimizer state
    over_state: int  # most bytes above those at any time
    by_phase: dict[str, int]  # the same, within each phase
    state_blocks: dict[int, int]  # bytes of the state by block
    above: tuple[Allocation, ...]  # at that time, what was allocated above the state


def peak(trace: Trace, way: Way = "wait") -> Peak:
    """The peak if the allocator takes back what NCCL uses in one of these ways."""
    replay = _Replay(way)
    for event in trace.events:
        replay.take(event)
    return Peak(
        state=replay.base,
        over_state=max(replay.most, 0),
        by_phase=dict(replay.by_phase),
        state_blocks=replay.state,
        above=tuple(replay.at_peak),
    )


class _Replay:
    def __init__(self, way: Way) -> None:
        self._way = way
        self._recorded: set[int] = set()  # blocks that the GPU may still use
        self.live: dict[int, Allocation] = {}
        self.bytes = self.base = 0
        self.most = -1
        self.at_peak: list[Allocation] = []
        self.by_phase: dict[str, int] = defaultdict(int)
        self.state: dict[int, int] = {}
        self._kept: dict[int, int] = defaultdict(int)
        self._works: dict[int, list[int]] = {}
        self._freed: set[int] = set()

    def take(self, event: object) -> None:
        if isinstance(event, StepStart):
            self.base, self.most = self.bytes, -1
            self.at_peak = []
            self.state = {block: one.nbytes for block, one in self.live.items()}
            self.by_phase.clear()
        elif isinstance(event, Allocation):
            self.live[event.block] = event
            self.bytes += event.nbytes
            self._note(event.phase)
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
        elif isinstance(event, Kernel):
            self._note(event.phase)
        elif isinstance(event, HostSync):
            freed, self._recorded = self._recorded & self._freed, set()
            for block in freed:
                self._release(block)

    def _note(self, phase: str) -> None:
        over = self.bytes - self.base
        if over > self.by_phase[phase]:
            self.by_phase[phase] = over
        if over > self.most:
            self.most = over
            self.at_peak = [
                a for block, a in self.live.items() if block not in self.state
            ]

    def _release(self, block: int) -> None:
        if not self._kept[block] and block not in self._recorded and block in self.live:
            self.bytes -= self.live.pop(block).nbytes
