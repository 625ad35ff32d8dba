"""Where the time of a step goes on each rank of a run, from the ranks' traces.

compute + exposed + idle is the step. Communication is exposed where nothing is
computed, and overlapped where something is. Idle is the rest: on a CPU also Python
between two operators.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from megatron_muon.lab.trace.collectives import Call
from megatron_muon.lab.trace.events import TraceError, files_of, rank_of
from megatron_muon.lab.trace.rank_trace import RankTrace
from megatron_muon.lab.trace.spans import Spans

_SUMS = ["count", "ms", "exposed_ms", "bytes", "sent_bytes"]
_MOST_KINDS = 1000


class Run(NamedTuple):
    """A run, as means over the steps of each trace.

    ``ranks`` has a row for each rank: file, device, steps (0: no marks, the trace is
    one step), ms of the step and of its parts. ``kinds`` has one for each rank and kind
    of collective: count, ms in which one is under way, the exposed part of it, bytes of
    whole buffers, sent bytes. NaN is unknown.
    """

    name: str
    ranks: pd.DataFrame
    kinds: pd.DataFrame

    def means(self) -> pd.DataFrame:
        """The collectives by name, as means over ranks, with GB/s; the longest
        first.
        """
        groups = self.kinds.groupby("name", sort=False)[_SUMS]
        sums = groups.agg(lambda each: each.sum(skipna=False)) / len(self.ranks)
        ms = sums["ms"].where(sums["ms"] > 0)
        rates = {
            "GB/s": sums["bytes"] / ms / 1e6,
            "bus GB/s": sums["sent_bytes"] / ms / 1e6,
        }
        return sums.assign(**rates).sort_values("ms", ascending=False, kind="stable")


def read_run(path: Path, name: str) -> Run:
    """Measure a run, one trace at a time; a TraceError for a bad file, or two of one
    rank.
    """
    ranks: dict[int, dict[str, Any]] = {}
    kinds: list[dict[str, Any]] = []
    for number, file in enumerate(files_of(path)):
        trace = RankTrace(file)
        rank = rank_of(file, trace.file.metadata, number)
        if rank in ranks:
            other = f"{ranks[rank]['file']} is of rank {rank}, too"
            raise TraceError(
                f"{file}: {other}: give one run's folder, or each file by itself"
            )
        steps = Spans(trace.steps)
        compute = trace.compute.common(steps)
        ranks[rank] = _times(trace, steps, compute)
        kinds += [{"rank": rank} | row for row in _kinds(trace, steps, compute)]
    by_rank = pd.DataFrame.from_dict(ranks, orient="index").sort_index()
    return Run(name, by_rank, pd.DataFrame(kinds, columns=["rank", "name", *_SUMS]))


def _times(trace: RankTrace, steps: Spans, compute: Spans) -> dict[str, Any]:
    """The row of a rank: ms of its step and of the parts, as means over the steps."""
    traffic = Spans((call.start, call.stop) for call in trace.calls).common(steps)
    overlapped = traffic.length(compute)
    exposed = traffic.length() - overlapped
    idle = steps.length() - compute.length() - exposed
    optimizer = math.nan
    if trace.optimizer is not None:
        optimizer = trace.optimizer.length(steps)
    times = {
        "step": steps.length(),
        "compute": compute.length(),
        "communication": traffic.length(),
        "overlapped": overlapped,
        "exposed": exposed,
        "idle": max(0.0, idle),
        "optimizer": optimizer,
    }
    number = len(trace.steps)
    row: dict[str, Any] = {"file": trace.file.path.name, "device": trace.device}
    row["steps"] = number * trace.has_marks
    return row | {f"{part}_ms": 1e-3 * us / number for part, us in times.items()}


def _kinds(trace: RankTrace, steps: Spans, compute: Spans) -> Iterator[dict[str, Any]]:
    """The rows of a rank's kinds of collectives, as means over the steps."""
    by_name: dict[str, list[Call]] = defaultdict(list)
    ends = [(call.start, call.stop) for call in trace.calls]
    places = np.searchsorted(steps.edges(), np.array(ends).reshape(-1, 2), "right")
    for call, (start, stop) in zip(trace.calls, places.tolist(), strict=True):
        # it begins within a step, or an edge of one is within it
        if start % 2 or stop > start:
            name = " ".join(filter(None, (call.operation, call.dtype, call.place)))
            by_name[name].append(call)
    if len(by_name) > _MOST_KINDS:
        raise TraceError(
            f"{trace.file.path}: it has more than {_MOST_KINDS} kinds of collectives"
        )
    for name, calls in by_name.items():
        spans = Spans((call.start, call.stop) for call in calls)
        us = spans.length(steps)
        sums = {
            "count": len(calls),
            "ms": us / 1e3,
            "exposed_ms": (us - spans.length(compute)) / 1e3,
            "bytes": sum(call.bytes for call in calls),
            "sent_bytes": sum(call.sent_bytes for call in calls),
        }
        means = {key: value / len(trace.steps) for key, value in sums.items()}
        yield {"name": name} | means


def names_of(paths: Sequence[Path]) -> list[str]:
    """A short name for each run, all different."""
    plain = [
        re.sub(r"(\.pt|\.trace|\.json|\.gz)+$", "", path.resolve().name)
        for path in paths
    ]
    longer = [
        f"{path.resolve().parent.name}/{of_kind}"
        for path, of_kind in zip(paths, plain, strict=True)
    ]
    numbered = [f"{number}:{of_kind}" for number, of_kind in enumerate(longer, 1)]
    return next(
        names for names in (plain, longer, numbered) if len(set(names)) == len(names)
    )
