"""One Chrome trace of several ranks, each a process of it, on one clock."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_muon.lab.traces.clocks import CLOCK, Clock, Stamps, clocks
from megatron_muon.lab.traces.rank_trace import microseconds
from megatron_muon.lab.traces.runs import MERGED, files_of, rank_of
from megatron_muon.lab.traces.stream import TraceError, TraceFile

_PROCESSES = 1000  # of a rank: the host, its GPUs, and what torch adds for its own rows


@dataclass(frozen=True, slots=True)
class RankFile:
    """A rank's file, and what a merge needs to know of it before it reads the events again.

    Attributes:
        path: the file.
        rank: the rank.
        stage: its pipeline stage; None where the trace does not tell.
        base_ns: the time that its microseconds count from.
        stamps: its clock.
    """

    path: Path
    rank: int
    stage: int | None
    base_ns: int
    stamps: Stamps


@dataclass(frozen=True, slots=True)
class Merged:
    """A file that has been written.

    Attributes:
        path: the file.
        stage: the pipeline stage, or None.
        clocks: of each rank in it.
    """

    path: Path
    stage: int | None
    clocks: Sequence[Clock]


def merge(folder: Path) -> list[Merged]:
    """Write ``merged.stageN.json.gz`` into a folder for each pipeline stage of its traces.

    Traces that tell no stage are merged into ``merged.json.gz``. One event is in memory at a time.

    Raises:
        TraceError: a file is no trace, or the files are not of the same steps.
        OSError: a file cannot be written.
    """
    by_stage: dict[int | None, list[RankFile]] = defaultdict(list)
    for number, path in enumerate(files_of(folder)):
        source = _source(path, number)
        by_stage[source.stage].append(source)
    written = []
    for stage, sources in sorted(by_stage.items(), key=lambda item: (item[0] is None, item[0])):
        sources.sort(key=lambda source: source.rank)
        ranks = [source.rank for source in sources]
        if len(set(ranks)) < len(ranks):
            raise TraceError(f"{folder}: two of its traces are of one rank: {ranks}")
        try:
            aligned = clocks([source.stamps for source in sources])
        except ValueError as error:
            raise TraceError(f"{folder}: {error}") from error
        name = MERGED + ("" if stage is None else f".stage{stage}") + ".json.gz"
        _write(folder / name, sources, aligned)
        written.append(Merged(folder / name, stage, aligned))
    return written


def _source(path: Path, number: int) -> RankFile:
    file = TraceFile(path)
    meetings = []
    for at, event in enumerate(file.events()):
        if event.get("name") == CLOCK and event.get("cat") == "user_annotation":
            try:
                start = microseconds(event, "ts")
                meetings.append((start, start + microseconds(event, "dur")))
            except ValueError as error:
                raise TraceError(f"{path}: event {at}: {error}") from error
    base = file.metadata.get("baseTimeNanoseconds", 0)
    if isinstance(base, bool) or not isinstance(base, int) or not 0 <= base < 1 << 63:
        raise TraceError(f"{path}: baseTimeNanoseconds is {str(base)[:40]!r}")
    own = file.metadata.get("megatron_muon")
    own = own if isinstance(own, dict) else {}
    stage, boot = own.get("stage"), own.get("boot")
    rank = rank_of(path, file.metadata, number)
    absolute = [(start + base / 1e3, stop + base / 1e3) for start, stop in sorted(meetings)]
    return RankFile(
        path,
        rank,
        stage if isinstance(stage, int) and not isinstance(stage, bool) and stage >= 0 else None,
        base,
        Stamps(rank, boot if isinstance(boot, str) else "", absolute),
    )


def _write(path: Path, sources: Sequence[RankFile], aligned: Sequence[Clock]) -> None:
    part = path.with_name(f".{path.name}")
    try:
        with gzip.open(part, "wt", encoding="utf-8", compresslevel=6) as out:
            own = {"clocks": [asdict(clock) for clock in aligned]}
            head = {"displayTimeUnit": "ms", "baseTimeNanoseconds": sources[0].base_ns}
            head |= {"megatron_muon": own}
            out.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            out.writelines(_separated(_all_events(sources, aligned)))
            out.write("\n]}\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _separated(events: Iterable[dict[str, Any]]) -> Iterator[str]:
    separator = ""
    for event in events:
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"


def _all_events(sources: Sequence[RankFile], aligned: Sequence[Clock]) -> Iterator[dict[str, Any]]:
    for source, clock in zip(sources, aligned, strict=True):
        shift = (source.base_ns - sources[0].base_ns) / 1e3 - clock.offset_us
        yield from _moved(source, shift)


def _moved(source: RankFile, shift: float) -> Iterator[dict[str, Any]]:
    """A rank's events with processes, flows and times of their own."""
    processes: dict[str, int] = {}
    for at, event in enumerate(TraceFile(source.path).events()):
        try:
            if "ts" in event:
                event["ts"] = round(microseconds(event, "ts") + shift, 3)
        except ValueError as error:
            raise TraceError(f"{source.path}: event {at}: {error}") from error
        process = str(event.get("pid"))[:80]
        if len(processes) >= _PROCESSES and process not in processes:
            raise TraceError(f"{source.path}: it has more than {_PROCESSES} processes")
        is_new = process not in processes
        event["pid"] = processes.setdefault(process, source.rank * _PROCESSES + len(processes))
        if is_new:
            yield _named(event["pid"], f"rank {source.rank}: {process}")
            yield _sorted(event["pid"])
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_sort_index"):
            continue
        if "id" in event:
            event["id"] = f"{source.rank}.{str(event['id'])[:80]}"
        yield event


def _named(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def _sorted(process: int) -> dict[str, Any]:
    args = {"sort_index": process}
    return {"ph": "M", "name": "process_sort_index", "pid": process, "args": args}
