"""One step of a rank, as lanes of a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_muon.lab.traces.intervals import Interval, common, length, union
from megatron_muon.lab.traces.rank_trace import RankTrace

_MOST = 9  # lanes of collectives; the shortest are left out
_FINEST = 2000  # a gap below this part of the step is not drawn


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of a picture.

    Attributes:
        name: what it shows.
        is_traffic: whether it is communication.
        spans: (start, length) in ms from the begin of the step.
    """

    name: str
    is_traffic: bool
    spans: tuple[tuple[float, float], ...]


def lanes(trace: RankTrace) -> list[Lane]:
    """The lanes of the trace's last step: compute, phases on the host's thread, collectives."""
    _, step = trace.steps[-1]
    work = [("compute", False, common(trace.compute, [step]))]
    if trace.optimizer is not None:
        work.append(("optimizer", False, common(trace.optimizer, [step])))
    if trace.device == "cpu":  # on a GPU the host's phases are not when the kernels run
        phases: dict[str, list[Interval]] = defaultdict(list)
        for name, interval in trace.phases:
            if name.startswith("muon/") and name.count("/") == 1:
                phases[name].append(interval)
        work += [(name, False, common(union(own), [step])) for name, own in phases.items()]
    kinds: dict[str, list[Interval]] = defaultdict(list)
    for each in trace.collectives:
        kinds[f"{each.operation} {each.place}".strip()].append((each.start, each.stop))
    traffic = [(name, True, common(union(own), [step])) for name, own in kinds.items()]
    traffic.sort(key=lambda lane: -length(lane[2]))
    gap = (step[1] - step[0]) / _FINEST
    return [
        Lane(name, is_traffic, _drawn(spans, step[0], gap))
        for name, is_traffic, spans in [*work, *traffic[:_MOST]]
        if len(spans)
    ]


def _drawn(spans: Iterable[Interval], begin: float, gap: float) -> tuple[tuple[float, float], ...]:
    wide = union((start, stop + gap) for start, stop in spans)
    return tuple(((start - begin) / 1e3, (stop - gap - start) / 1e3) for start, stop in wide)
