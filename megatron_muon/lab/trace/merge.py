"""One Chrome trace of several ranks, each a process of it, on one clock.

No rank leaves a meeting before all have come to it. Say the first rank was there from ``a`` to
``b`` and another from ``c`` to ``d``, each by its own clock. Then c - b <= offset <= d - a, where
``offset`` is what the other's clock shows more. Every meeting narrows that. Ranks of one machine
share a clock, and their offset is 0.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_muon.lab.trace.events import MERGED, TraceError, TraceFile, files_of, rank_of
from megatron_muon.lab.trace.spans import Interval

_CLOCK = "trace/clock"  # the recorder's mark of a meeting
# On one machine: profilers convert a counter of the processor to time, each for itself.
_SAME_CLOCK_US = 50.0
_NOT_SAME = ": these are not traces of the same steps"
_PROCESSES = 1000  # of a rank: the host, its GPUs, and what torch adds for its own rows


class Source(NamedTuple):
    """A rank's file: its stage or -1, machine or "", the time that it counts from, its meetings."""

    path: Path
    rank: int
    stage: int
    boot: str
    base_ns: int
    meetings: list[Interval]


class Clock(NamedTuple):
    """A rank's clock beside the first rank's.

    ``offset_us`` is what it shows more, and is wrong by ``within_us`` at most if clocks do not
    drift within the traced steps; None where nothing bounds it.
    """

    rank: int
    offset_us: float
    within_us: float | None
    how: Literal["first", "same machine", "meetings", "not aligned"]


def merge(folder: Path) -> dict[Path, list[Clock]]:
    """Write ``merged.stageN.json.gz`` into a folder for each pipeline stage of its traces.

    Traces that tell no stage are merged into ``merged.json.gz``. One event is in memory at a time.
    Returns the clocks of the ranks in each written file.

    Raises:
        TraceError: a file is no trace, or the files are not of the same steps.
        OSError: a file cannot be written.
    """
    stages: dict[int, list[Source]] = defaultdict(list)
    for number, path in enumerate(files_of(folder)):
        source = _source(path, number)
        stages[source.stage].append(source)
    written = {}
    for stage, sources in sorted(stages.items()):
        sources.sort(key=lambda source: source.rank)
        if len({source.rank for source in sources}) < len(sources):
            raise TraceError(f"{folder}: two of its traces are of one rank")
        try:
            clocks = [clock(sources[0], source) for source in sources]
        except ValueError as error:
            raise TraceError(f"{folder}: {error}") from error
        path = folder / (MERGED + (f".stage{stage}" if stage >= 0 else "") + ".json.gz")
        _write(path, sources, clocks)
        written[path] = clocks
    return written


def clock(first: Source, other: Source) -> Clock:
    """A rank's clock.

    Raises:
        ValueError: the two met a different number of times, or are of one machine and contradict
            each other.
    """
    if other is first:
        return Clock(first.rank, 0.0, 0.0, "first")
    ranks = f"ranks {first.rank} and {other.rank}"
    counts = len(first.meetings), len(other.meetings)
    if counts[0] != counts[1]:
        raise ValueError(f"{ranks} met the others {counts[0]} and {counts[1]} times{_NOT_SAME}")
    pairs = list(zip(first.meetings, other.meetings, strict=True))
    least = max((c - b for (_, b), (c, _) in pairs), default=None)
    most = min((d - a for (a, _), (_, d) in pairs), default=None)
    if first.boot and first.boot == other.boot:
        wrong = max(least or 0.0, -(most or 0.0), 0.0)
        if wrong > _SAME_CLOCK_US:
            raise ValueError(f"{ranks} of one machine met {wrong:.0f} us apart{_NOT_SAME}")
        return Clock(other.rank, 0.0, wrong, "same machine")
    if least is None or most is None:
        return Clock(other.rank, 0.0, None, "not aligned")
    return Clock(other.rank, (least + most) / 2, abs(most - least) / 2, "meetings")


def _source(path: Path, number: int) -> Source:
    file, meetings = TraceFile(path), []
    for event in file.events():
        if event.get("name") == _CLOCK and event.get("ph") == "X":
            meetings.append((event["ts"], event["ts"] + event["dur"]))
    base = file.metadata.get("baseTimeNanoseconds", 0)
    if isinstance(base, bool) or not isinstance(base, int) or not 0 <= base < 1 << 63:
        raise TraceError(f"{path}: baseTimeNanoseconds is {str(base)[:40]!r}")
    own = file.metadata.get("megatron_muon")
    stage, boot = (own.get("stage"), own.get("boot")) if isinstance(own, dict) else (-1, "")
    stage = stage if isinstance(stage, int) and not isinstance(stage, bool) else -1
    absolute = sorted((start + base / 1e3, stop + base / 1e3) for start, stop in meetings)
    rank = rank_of(path, file.metadata, number)
    return Source(path, rank, max(stage, -1), str(boot or "")[:80], base, absolute)


def _write(path: Path, sources: list[Source], clocks: list[Clock]) -> None:
    base = sources[0].base_ns
    head = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base}
    head |= {"megatron_muon": {"clocks": [each._asdict() for each in clocks]}}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    out = gzip.open(part, "xt", compresslevel=6)  # a new file, and no link's
    try:
        with out:
            out.write(json.dumps(head)[:-1] + ', "traceEvents": [')
            separator = "\n"
            for source, each in zip(sources, clocks, strict=True):
                for event in _moved(source, (source.base_ns - base) / 1e3 - each.offset_us):
                    out.write(separator + json.dumps(event, separators=(",", ":")))
                    separator = ",\n"
            out.write("\n]}\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _moved(source: Source, shift: float) -> Iterator[dict[str, Any]]:
    """A rank's events with processes, flows and times of their own."""
    processes: dict[str, int] = {}
    for event in TraceFile(source.path).events():
        if "ts" in event:
            event["ts"] = round(event["ts"] + shift, 3)
        process = str(event.get("pid"))[:80]
        if process not in processes:
            pid = processes[process] = source.rank * _PROCESSES + len(processes)
            if len(processes) > _PROCESSES:
                raise TraceError(f"{source.path}: it has more than {_PROCESSES} processes")
            for name, value in (("name", f"rank {source.rank}: {process}"), ("sort_index", pid)):
                yield {"ph": "M", "name": f"process_{name}", "pid": pid, "args": {name: value}}
        event["pid"] = processes[process]
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_sort_index"):
            continue
        if "id" in event:  # Perfetto joins flows by it
            event["id"] = f"{source.rank}.{str(event['id'])[:80]}"
        yield event
