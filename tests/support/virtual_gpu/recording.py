"""The record of one rank, and the figures that follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from support.virtual_gpu.memory import Peak, peak
from support.virtual_gpu.races import MEMORY, Race, races
from support.virtual_gpu.trace import (
    Event,
    HostSync,
    IterationStart,
    Kernel,
    RecordedCollective,
    StepStart,
    Trace,
)


@dataclass(frozen=True)
class Recording:
    """A rank's trace of one or more steps. Counts are of the last step, races of
    all.
    """

    rank: int  # of the world that was recorded
    trace: Trace  # everything
    # kinds of the state's blocks, where they are known
    held: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def step(self) -> list[Event]:
        """Events of the last step."""
        return self._from_last(StepStart)

    @cached_property
    def iteration(self) -> list[Event]:
        """Events of the last training iteration, whose end is the last step."""
        return self._from_last(IterationStart)

    @cached_property
    def before(self) -> list[Event]:
        """Events before the first training iteration: those of the construction."""
        events = self.trace.events
        kinds = (StepStart, IterationStart)
        first = next(
            (i for i, event in enumerate(events) if isinstance(event, kinds)),
            len(events),
        )
        return events[:first]

    def _from_last(self, kind: type) -> list[Event]:
        events = self.trace.events
        starts = [i for i, event in enumerate(events) if isinstance(event, kind)]
        return events[starts[-1] :] if starts else events

    @property
    def operations(self) -> list[Kernel | RecordedCollective]:
        """Operations and collectives of the last step; some operations launch several
        kernels.
        """
        kinds = (Kernel, RecordedCollective)
        return [event for event in self.step if isinstance(event, kinds)]

    @property
    def launches(self) -> int:
        """Kernels and collectives launched in the last step."""
        return self.launches_by("phase").total()

    def launches_by(self, attribute: str) -> Counter[str]:
        """The same by ``phase``, or by the operation's ``name``."""
        counts: Counter[str] = Counter()
        for each in self.operations:
            counts[getattr(each, attribute)] += getattr(each, "launches", 1)
        return counts

    @property
    def host_syncs(self) -> list[HostSync]:
        """Where the host waited in the last step."""
        return [event for event in self.step if isinstance(event, HostSync)]

    @property
    def collectives(self) -> list[RecordedCollective]:
        """The last step's collectives, in order."""
        return [event for event in self.step if isinstance(event, RecordedCollective)]

    @cached_property
    def peak(self) -> Peak:
        """Memory of the last step."""
        return peak(self.trace)

    @property
    def peak_bytes(self) -> int:
        """Most bytes in the last step above those at its start."""
        return self.peak.over_state

    @cached_property
    def races(self) -> list[Race]:
        """The races of all steps, under every handling of collectives' memory."""
        return [race for memory in MEMORY for race in races(self.trace, memory)]
