"""One rank's last training iteration: figures, and faults of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from support.virtual_gpu.memory import Peak
from support.virtual_gpu.messages import unaligned
from support.virtual_gpu.races import Race
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.trace import Allocation, RecordedCollective

EXCHANGE = "muon/"
CONNECT = "muon/connect"
_ELSEWHERE = "not attributed"


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank. Counts are of the last ``optimizer.step()``."""

    rank: int  # of the world
    launches: int  # kernels and collectives
    muon_launches: int  # those in Muon's phases, AdamW's not counted
    sent: int  # bytes that the exchange sends in a step
    messages: int  # point-to-point messages that the exchange sends in a step
    # calls in ``optimizer.step()`` in which the host waits for the GPU.
    host_waits: tuple[str, ...]
    state: dict[str, int]  # bytes by kind when the step begins
    # bytes above the state by kind, at the moment when they are most
    peak: dict[str, int]
    connections: int  # ranks that the exchange connects to while the optimizer is built
    late_connections: (
        int  # ranks that a step exchanges with and that were not connected then
    )
    races: tuple[str, ...]  # faults of its own streams and memory, in words
    early_frees: tuple[str, ...]
    unaligned: tuple[str, ...]  # messages that start at no multiple of 16 bytes

    @property
    def state_bytes(self) -> int:
        return sum(self.state.values())

    @property
    def peak_bytes(self) -> int:
        """Above the state."""
        return sum(self.peak.values())


def report_of(recording: Recording) -> RankReport:
    """The figures of a recording of two or more iterations."""
    exchange = exchange_calls(recording)
    peers = {
        message.peer for call in exchange for message in (*call.sends, *call.receives)
    }
    connected = {
        message.peer
        for call in recording.before
        if isinstance(call, RecordedCollective) and call.phase.startswith(CONNECT)
        for message in (*call.sends, *call.receives)
    }
    races = list(recording.races)
    return RankReport(
        rank=recording.rank,
        launches=recording.launches,
        muon_launches=sum(
            count
            for phase, count in recording.launches_by("phase").items()
            if phase.startswith(EXCHANGE) and phase != "muon/adamw"
        ),
        sent=sum(message.nbytes for call in exchange for message in call.sends),
        messages=sum(len(call.sends) for call in exchange),
        host_waits=tuple(wait.name for wait in recording.host_syncs),
        state=_state(recording),
        peak=_peak(recording.peak),
        connections=len(connected),
        late_connections=len(peers - connected),
        races=_said(race for race in races if race.kind == "unordered"),
        early_frees=_said(race for race in races if race.kind == "freed"),
        unaligned=tuple(unaligned(exchange)),
    )


def exchange_calls(recording: Recording) -> list[RecordedCollective]:
    """The exchange's launches in the last step, in order."""
    return [
        call
        for call in recording.collectives
        if call.point_to_point and call.phase.startswith(EXCHANGE)
    ]


def _said(races: Iterator[Race]) -> tuple[str, ...]:
    return tuple(str(race) for race in races)


def _state(recording: Recording) -> dict[str, int]:
    by_kind: dict[str, int] = defaultdict(int)
    for block, nbytes in recording.peak.state_blocks.items():
        by_kind[recording.held.get(block, "tables and counters")] += nbytes
    return _largest_first(by_kind)


def _peak(peak: Peak) -> dict[str, int]:
    by_kind: dict[str, int] = defaultdict(int)
    for allocation in peak.above:
        by_kind[_kind(allocation)] += allocation.nbytes
    return _largest_first(by_kind)


def _largest_first(by_kind: dict[str, int]) -> dict[str, int]:
    return dict(sorted(by_kind.items(), key=lambda item: -item[1]))


# Kinds of what a step allocates, by the folder or file of the package that does.
_KINDS = (
    ("orthogonalize/", "Newton-Schulz scratch"),
    ("runtime/exchange/", "staged rounds"),
    ("runtime/collectives.py", "staged rounds"),
    ("runtime/round.py", "staged rounds"),
    ("runtime/", "scratch of momentum and update"),
)


def _kind(allocation: Allocation) -> str:
    place = allocation.place
    if place.is_megatrons:
        return "Megatron's own"
    return next(
        (kind for start, kind in _KINDS if place.file.startswith(start)), _ELSEWHERE
    )
