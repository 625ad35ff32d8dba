"""Work of a rank's GPU, in the order in which the host issues it: data, no analysis."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import torch

import megatron_muon

MAIN = "main"  # the stream that is current unless the program says otherwise

Range = tuple[int, int, int]  # block, first byte, one after the last byte


@dataclass(frozen=True, slots=True)
class Place:
    """The line of the package or of Megatron that issued an event, if one did."""

    code: CodeType | None
    line: int

    @property
    def caller(self) -> str:
        """The function's name."""
        return "elsewhere" if self.code is None else self.code.co_name

    @property
    def file(self) -> str:
        """Its path inside the package or Megatron's core."""
        if self.code is None:
            return "elsewhere"
        path = self.code.co_filename.replace("\\", "/")
        return next((path.split(mark)[-1] for mark in _OURS if mark in path), path)

    @property
    def is_megatrons(self) -> bool:
        """The line is Megatron's."""
        return self.code is not None and _OURS[1] in self.code.co_filename.replace(
            "\\", "/"
        )

    def __str__(self) -> str:
        return (
            "elsewhere"
            if self.code is None
            else f"{self.file}:{self.line} {self.caller}"
        )


@dataclass(slots=True)
class Kernel:
    """An aten operation, or a fused kernel of another library."""

    name: str  # as in torch's schema without the namespace
    stream: str  # that it runs on
    launches: int  # kernels that CUDA launches for it
    reads: list[Range]  # bytes of blocks
    writes: list[Range]
    phase: str  # innermost ``record_function`` around it
    place: Place  # who called it


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: its name, and its ranks in the world in the group's order."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A message to or from one rank of the group in a collective."""

    peer: int  # rank in the group
    dtype: torch.dtype  # of its elements
    nbytes: int  # its size
    start: int  # its place in its block, in bytes


@dataclass(slots=True)
class RecordedCollective:
    """One launch of NCCL: a collective, a point-to-point operation, or a group of
    several.
    """

    # what it is made of, ``all_reduce``, ``send``, …; several in a coalesced group
    kinds: tuple[str, ...]
    group: Group  # over which
    rank: int  # this rank's number in the group
    stream: str  # that was current when it was called
    own_stream: (
        str  # NCCL's stream for it: one a group, and one a pair for single sends
    )
    asynchronous: (
        bool  # the caller gets a ``Work``; if not, the current stream waits at once
    )
    reads: list[Range]  # bytes of blocks
    writes: list[Range]
    # what all ranks of the group must say alike; empty for point-to-point operations
    agreed: tuple[object, ...]
    # blocks for which torch calls ``recordStream``, whatever its release
    recorded: frozenset[int]
    # messages of point-to-point operations, in order
    sends: tuple[RecordedMessage, ...]
    receives: tuple[RecordedMessage, ...]
    work: int  # number by which a ``WorkWait`` names it
    phase: str  # as of a kernel
    place: Place

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys(self.kinds))

    @property
    def point_to_point(self) -> bool:
        return not self.agreed


@dataclass(slots=True)
class WorkWait:
    """``Work.wait()``: the stream waits for the collective, the host does not."""

    work: int
    stream: str


@dataclass(slots=True)
class EventRecord:
    """``Event.record()``: the event is what the stream has been given so far."""

    event: int
    stream: str


@dataclass(slots=True)
class StreamWait:
    """``Stream.wait_event()``."""

    event: int
    stream: str


@dataclass(slots=True)
class HostSync:
    """The host waits for the GPU."""

    name: (
        str  # of the call: ``item``, ``tolist``, ``bool``, ``cpu``, ``synchronize``, …
    )
    stream: str | None  # that it waits for; None for all of them
    event: int | None  # that it waits for, in place of a stream
    phase: str  # as of a kernel
    place: Place


@dataclass(slots=True)
class Allocation:
    """A block of the caching allocator, in sizes as it rounds them."""

    block: int
    nbytes: int
    stream: str
    phase: str
    place: Place


@dataclass(slots=True)
class Free:
    """The last tensor on a block is gone: the allocator may reuse it on the block's
    stream.
    """

    block: int
    phase: str


@dataclass(slots=True)
class RecordStream:
    """``Tensor.record_stream()``: the allocator waits for this stream, too."""

    block: int
    stream: str


@dataclass(slots=True)
class IterationStart:
    """A training iteration begins, with the forward pass."""


@dataclass(slots=True)
class StepStart:
    """An optimizer step begins; counts are of the last one."""


Event = (
    Kernel
    | RecordedCollective
    | WorkWait
    | EventRecord
    | StreamWait
    | HostSync
    | Allocation
    | Free
    | RecordStream
    | IterationStart
    | StepStart
)

_OURS = (f"{Path(megatron_muon.__file__).parent.as_posix()}/", "/megatron/core/")
# Marks inside a phase: the package's around a call of torch.distributed, torch's of an
# optimizer.
_NAMELESS = re.compile(r"^Optimizer\.|/(collective|wait)$")
_NOWHERE = Place(None, 0)


@dataclass(slots=True)
class Trace:
    """Events in issue order, and the phases that are open."""

    events: list[Event] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)

    @property
    def phase(self) -> str:
        return self.phases[-1] if self.phases else ""

    def enter(self, name: str) -> None:
        inside = self.phases and _NAMELESS.search(name)
        self.phases.append(self.phase if inside else name)

    def leave(self) -> None:
        self.phases.pop()

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()


def place() -> Place:
    """The innermost frame that is the package's or Megatron's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        ours = _known.get(code)
        if ours is None:
            ours = _known[code] = _is_ours(code.co_filename.replace("\\", "/"))
        if ours:
            return Place(code, frame.f_lineno)
        frame = frame.f_back
    return _NOWHERE


def _is_ours(path: str) -> bool:
    return any(mark in path for mark in _OURS)


_known: dict[CodeType, bool] = {}
