"""Where the time of a step goes on each rank of a run, from the ranks' traces.

compute + exposed + idle is the step. Communication is exposed where nothing is
computed, and overlapped where something is. Idle is the rest: on a CPU also Python
between two operators.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
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
        ranks[rank], of_rank = _measured(trace)
        kinds += [{"rank": rank, **each} for each in of_rank]
    by_rank = pd.DataFrame.from_dict(ranks, orient="index").sort_index()
    return Run(name, by_rank, pd.DataFrame(kinds, columns=["rank", "name", *_SUMS]))


def _measured(trace: RankTrace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of a rank's step: its times, and its kinds of collectives."""
    number = len(trace.steps)
    steps = Spans(trace.steps)
    compute = trace.compute.common(steps)
    traffic = Spans((call.start, call.stop) for call in trace.calls).common(steps)
    exposed = traffic.length() - traffic.length(compute)
    times = {
        "step": steps.length(),
        "compute": compute.length(),
        "communication": traffic.length(),
        "overlapped": traffic.length(compute),
        "exposed": exposed,
        "idle": max(0.0, steps.length() - compute.length() - exposed),
        "optimizer": math.nan
        if trace.optimizer is None
        else trace.optimizer.length(steps),
    }
    row = {
        "file": trace.file.path.name,
        "device": trace.device,
        "steps": number * trace.has_marks,
    }
    row |= {f"{each}_ms": 1e-3 * us / number for each, us in times.items()}
    calls: dict[str, list[Call]] = defaultdict(list)
    ends = [(call.start, call.stop) for call in trace.calls]
    places = np.searchsorted(steps.edges(), np.array(ends).reshape(-1, 2), "right")
    for call, (start, stop) in zip(trace.calls, places.tolist(), strict=True):
        # it begins within a step, or an edge of one is within it
        if start % 2 or stop > start:
            calls[
                " ".join(filter(None, (call.operation, call.dtype, call.place)))
            ].append(call)
    if len(calls) > _MOST_KINDS:
        raise TraceError(
            f"{trace.file.path}: it has more than {_MOST_KINDS} kinds of collectives"
        )
    kinds = []
    for name, of_kind in calls.items():
        spans = Spans((call.start, call.stop) for call in of_kind)
        us = spans.length(steps)
        sums = {
            "count": len(of_kind),
            "ms": us / 1e3,
            "exposed_ms": (us - spans.length(compute)) / 1e3,
            "bytes": sum(call.bytes for call in of_kind),
            "sent_bytes": sum(call.sent_bytes for call in of_kind),
        }
        means = {key: value / number for key, value in sums.items()}
        kinds.append({"name": name} | means)
    return row, kinds


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
