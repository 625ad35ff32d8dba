"""How far the clocks of ranks may differ, from their meetings in their traces.

No rank leaves a meeting before all have come to it. Say rank 0 was there from ``a`` to ``b`` and
rank i from ``c`` to ``d``, each by its own clock. Then c - b <= offset <= d - a, where ``offset``
is what rank i's clock shows more than rank 0's. Every meeting narrows that. Ranks of one machine
share a clock, and their offset is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_muon.lab.traces.intervals import Interval

CLOCK = "trace/clock"  # the recorder's mark of a meeting
# On one machine: profilers convert a counter of the processor to time, each for itself.
SAME_CLOCK_US = 50.0


@dataclass(frozen=True, slots=True)
class Clock:
    """A rank's clock beside that of the first rank.

    Attributes:
        rank: the rank.
        offset_us: what its clock shows more; subtract it from its times.
        within_us: by how much ``offset_us`` may be wrong at most, if clocks do not drift within
            the traced steps; None where nothing bounds it.
        how: ``first``, ``same machine``, ``meetings``, or ``not aligned``: nothing tells.
    """

    rank: int
    offset_us: float
    within_us: float | None
    how: Literal["first", "same machine", "meetings", "not aligned"]


@dataclass(frozen=True, slots=True)
class Stamps:
    """A rank's clock, as its trace shows it.

    Attributes:
        rank: the rank.
        boot: the machine's, as the recorder wrote it; "" where it is not known.
        meetings: the intervals of the meetings by the rank's own clock, in order.
    """

    rank: int
    boot: str
    meetings: Sequence[Interval]


def clocks(stamps: Sequence[Stamps]) -> list[Clock]:
    """The clock of every rank beside that of the first.

    Raises:
        ValueError: two ranks of one machine, or two that met, contradict each other; or two ranks
            met a different number of times.
    """
    return [Clock(stamps[0].rank, 0.0, 0.0, "first")] + [
        _beside(stamps[0], other) for other in stamps[1:]
    ]


def _beside(first: Stamps, other: Stamps) -> Clock:
    if len(first.meetings) != len(other.meetings):
        raise ValueError(
            f"rank {first.rank} met the others {len(first.meetings)} times and rank {other.rank} "
            f"{len(other.meetings)} times: these are not traces of the same steps"
        )
    pairs = list(zip(first.meetings, other.meetings, strict=True))
    least = max((c - b for (_, b), (c, _) in pairs), default=None)
    most = min((d - a for (a, _), (_, d) in pairs), default=None)
    if first.boot and first.boot == other.boot:
        wrong = max(least or 0.0, -(most or 0.0), 0.0)
        if wrong > SAME_CLOCK_US:
            raise ValueError(
                f"ranks {first.rank} and {other.rank} are of one machine, and their meetings are "
                f"{wrong:.0f} us apart: these are not traces of the same steps"
            )
        return Clock(other.rank, 0.0, wrong, "same machine")
    if least is None or most is None:
        return Clock(other.rank, 0.0, None, "not aligned")
    return Clock(other.rank, (least + most) / 2, abs(most - least) / 2, "meetings")
