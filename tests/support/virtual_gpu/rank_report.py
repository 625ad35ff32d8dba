"""One rank's last training iteration: figures, and faults of its own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from support.virtual_gpu.messages import unaligned
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.trace import RecordedCollective

EXCHANGE = "muon/"
CONNECT = "muon/connect"


@dataclass(frozen=True)
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
    peak_bytes: int  # most above the state
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
    races = recording.races
    return RankReport(
        rank=recording.rank,
        launches=recording.launches,
        muon_launches=sum(
            count
            for phase, count in recording.launches_by_phase.items()
            if phase.startswith(EXCHANGE) and phase != "muon/adamw"
        ),
        sent=sum(message.nbytes for call in exchange for message in call.sends),
        messages=sum(len(call.sends) for call in exchange),
        host_waits=tuple(wait.name for wait in recording.host_syncs),
        state=_state(recording),
        peak_bytes=recording.peak_bytes,
        connections=len(connected),
        late_connections=len(peers - connected),
        races=tuple(race.text for race in races if race.kind == "unordered"),
        early_frees=tuple(race.text for race in races if race.kind == "freed"),
        unaligned=tuple(unaligned(exchange)),
    )


def exchange_calls(recording: Recording) -> list[RecordedCollective]:
    """The exchange's launches in the last step, in order."""
    return [
        call
        for call in recording.collectives
        if call.point_to_point and call.phase.startswith(EXCHANGE)
    ]


def _state(recording: Recording) -> dict[str, int]:
    by_kind: dict[str, int] = defaultdict(int)
    for block, nbytes in recording.peak.state_blocks.items():
        by_kind[recording.held.get(block, "tables and counters")] += nbytes
    return by_kind
