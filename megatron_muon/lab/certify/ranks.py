"""One rank's last training iteration: figures, and faults of its own."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_muon.lab.certify.kinds import Chosen
from megatron_muon.lab.virtual_gpu.memory import Peak
from megatron_muon.lab.virtual_gpu.races import Race
from megatron_muon.lab.virtual_gpu.recording import Recording
from megatron_muon.lab.virtual_gpu.trace import Allocation, Group, RecordedCollective

EXCHANGE = "muon/"
CONNECT = "muon/connect"
_ELSEWHERE = "not attributed"


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of NCCL one after another that are alike.

    Attributes:
        phase: the part of the iteration.
        kinds: the collectives in them.
        count: the number of launches.
        group: their process group, in words.
        size: ranks in it.
        read, written: bytes of this rank's memory that they read and write.
        asynchronous: the host's stream goes on while they run.
    """

    phase: str
    kinds: tuple[str, ...]
    count: int
    group: str
    size: int
    read: int
    written: int
    asynchronous: bool


@dataclass(frozen=True, slots=True)
class HostWaits:
    """Times that the host waits for the GPU in ``optimizer.step()``, at one line."""

    name: str
    place: str
    phase: str
    count: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank. Counts are of the last ``optimizer.step()``, collectives of the last iteration.

    Attributes:
        rank: of the world.
        reason: why it is looked at.
        launches: kernels and collectives.
        muon_launches: those in Muon's phases, AdamW's not counted.
        collectives: one training iteration's, in order: gather of parameters, reduction of
            gradients, optimizer step.
        sent: bytes that the exchange sends in a step.
        messages: point-to-point messages that the exchange sends in a step.
        host_waits: in ``optimizer.step()``.
        state: bytes by kind when the step begins.
        peak: bytes above the state by kind, at the moment when they are most.
        connections: ranks that the exchange connects to while the optimizer is built.
        late_connections: ranks that a step exchanges with and that were not connected then.
        communicators: NCCL communicators that the rank takes part in up to the end of the step.
        races, early_frees: faults of its own streams and memory, in words.
    """

    rank: int
    reason: str
    launches: int
    muon_launches: int
    collectives: tuple[Launches, ...]
    sent: int
    messages: int
    host_waits: tuple[HostWaits, ...]
    state: dict[str, int]
    peak: dict[str, int]
    connections: int
    late_connections: int
    communicators: int
    races: tuple[str, ...]
    early_frees: tuple[str, ...]

    @property
    def state_bytes(self) -> int:
        return sum(self.state.values())

    @property
    def peak_bytes(self) -> int:
        """Above the state."""
        return sum(self.peak.values())


def report_of(recording: Recording, chosen: Chosen) -> RankReport:
    """The figures of a recording of two or more iterations."""
    exchange = exchange_calls(recording)
    peers = {message.peer for call in exchange for message in (*call.sends, *call.receives)}
    connected = {
        message.peer
        for call in recording.before
        if isinstance(call, RecordedCollective) and call.phase.startswith(CONNECT)
        for message in (*call.sends, *call.receives)
    }
    every = [event for event in recording.trace.events if isinstance(event, RecordedCollective)]
    races = list(recording.races)
    return RankReport(
        rank=recording.rank,
        reason=chosen.reason,
        launches=recording.launches,
        muon_launches=sum(
            count
            for phase, count in recording.launches_by_phase.items()
            if phase.startswith(EXCHANGE) and phase != "muon/adamw"
        ),
        collectives=tuple(_in_order(recording)),
        sent=sum(message.nbytes for call in exchange for message in call.sends),
        messages=sum(len(call.sends) for call in exchange),
        host_waits=tuple(_host_waits(recording)),
        state=_state(recording),
        peak=_peak(recording.peak),
        connections=len(connected),
        late_connections=len(peers - connected),
        communicators=len({call.own_stream for call in every}),
        races=_said(race for race in races if race.kind == "unordered"),
        early_frees=_said(race for race in races if race.kind == "freed"),
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


def _in_order(recording: Recording) -> Iterator[Launches]:
    calls = [event for event in recording.iteration if isinstance(event, RecordedCollective)]
    for (phase, group, asynchronous), alike in itertools.groupby(calls, key=_likeness):
        launches = list(alike)
        yield Launches(
            phase=phase,
            kinds=tuple(dict.fromkeys(call.name for call in launches)),
            count=len(launches),
            group=_group(group),
            size=len(group.ranks),
            read=sum(_bytes(call.reads) for call in launches),
            written=sum(_bytes(call.writes) for call in launches),
            asynchronous=asynchronous,
        )


def _likeness(call: RecordedCollective) -> tuple[str, Group, bool]:
    """Rounds go out and come back in turn: the exchange's launches are alike."""
    of_exchange = call.point_to_point and call.phase.startswith(EXCHANGE)
    phase = "muon/exchange" if of_exchange else call.phase
    return phase, call.group, call.asynchronous


def _group(group: Group) -> str:
    return group.name.removesuffix(" #0")


def _bytes(ranges: Sequence[tuple[int, int, int]]) -> int:
    return sum(stop - start for _, start, stop in ranges)


def _host_waits(recording: Recording) -> Iterator[HostWaits]:
    waits = Counter((wait.name, str(wait.place), wait.phase) for wait in recording.host_syncs)
    for (name, place, phase), count in waits.items():
        yield HostWaits(name, place, phase, count)


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
    return next((kind for start, kind in _KINDS if place.file.startswith(start)), _ELSEWHERE)
