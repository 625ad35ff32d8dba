"""Where the time of a step goes on each rank of a run, from the ranks' traces.

compute + exposed + idle is the step. Communication is exposed where nothing is
computed, and overlapped where something is. Idle is the rest: on a CPU also Python
between two operators.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from megatron_muon.lab.trace.collectives import Call
from megatron_muon.lab.trace.events import TraceError, files_of
from megatron_muon.lab.trace.rank_trace import RankTrace
from megatron_muon.lab.trace.spans import common, length, union

_SUMS = ["count", "ms", "exposed_ms", "bytes"]


class Run(NamedTuple):
    """A run, as means over the steps of each trace.

    ``ranks`` has a row for each rank: file, device, steps (0: no marks, the trace is
    one step), ms of the step and of its parts. ``kinds`` has one for each kind of
    collective, the longest first, as means over ranks: count, ms in which one is under
    way, the exposed part of it, bytes of whole buffers, GB/s. NaN is unknown.
    """

    name: str
    ranks: pd.DataFrame
    kinds: pd.DataFrame


def read_run(path: Path, name: str) -> Run:
    """Measure a run, one trace at a time; a TraceError for a bad file, or two of one
    rank.
    """
    ranks: dict[int, dict[str, Any]] = {}
    kinds: list[dict[str, Any]] = []
    for number, file in enumerate(files_of(path)):
        trace = RankTrace(file)
        rank = number if trace.rank is None else trace.rank
        if rank in ranks:
            other = f"{ranks[rank]['file']} is of rank {rank}, too"
            raise TraceError(
                f"{file}: {other}: give one run's folder, or each file by itself"
            )
        ranks[rank] = {"file": file.name, **_times(trace)}
        kinds += _kinds(trace)
    groups = pd.DataFrame(kinds, columns=["name", *_SUMS]).groupby("name")
    means = groups.agg(lambda each: each.sum(skipna=False)) / len(ranks)
    means["GB/s"] = means["bytes"] / means["ms"].where(means["ms"] > 0) / 1e6
    by_rank = pd.DataFrame.from_dict(ranks, orient="index").sort_index()
    return Run(name, by_rank, means.sort_values("ms", ascending=False))


def _times(trace: RankTrace) -> dict[str, Any]:
    """The row of a rank: ms of its step and of the parts, as means over the steps."""
    traffic = common(union(call.at for call in trace.calls), trace.steps)
    exposed = trace.exposed(traffic)
    times = {
        "step": length(trace.steps),
        "compute": length(trace.compute),
        "communication": length(traffic),
        "exposed": exposed,
        "idle": max(0.0, trace.exposed(trace.steps) - exposed),
    }
    if len(trace.optimizer):
        times["optimizer"] = length(trace.optimizer)
    number = 1e3 * max(1, trace.marked)
    ms = {f"{part}_ms": us / number for part, us in times.items()}
    return {"device": trace.device, "steps": trace.marked, **ms}


def _kinds(trace: RankTrace) -> Iterator[dict[str, Any]]:
    """The rows of a rank's kinds of collectives, as means over the steps in which they
    begin.
    """
    by_name: dict[str, list[Call]] = defaultdict(list)
    for call in trace.calls:
        if bisect(trace.steps, call.at[0]) % 2:
            by_name[call.name].append(call)
    for name, calls in by_name.items():
        spans = common(union(call.at for call in calls), trace.steps)
        sums = {
            "count": len(calls),
            "ms": length(spans) / 1e3,
            "exposed_ms": trace.exposed(spans) / 1e3,
            "bytes": sum(call.bytes for call in calls),
        }
        means = {key: value / max(1, trace.marked) for key, value in sums.items()}
        yield {"name": name, **means}


def names_of(paths: Sequence[Path]) -> list[str]:
    """A short name for each run, all different."""
    names = [path.absolute().name.split(".")[0] for path in paths]
    if len(set(names)) == len(names):
        return names
    return [f"{number}:{name}" for number, name in enumerate(names, 1)]
