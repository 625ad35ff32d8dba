"""Where the time of a step goes on a rank, from its trace; and over the ranks of a run.

compute + exposed + idle is the step. Communication is exposed where nothing is computed, and
overlapped where something is. Idle is the rest: on a CPU also Python between two operators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_muon.lab.traces.intervals import Union, common, length, union
from megatron_muon.lab.traces.names import bus_factor
from megatron_muon.lab.traces.rank_trace import Collective, RankTrace


@dataclass(frozen=True, slots=True)
class KindTimes:
    """The collectives of one kind in a step of a rank, as means over its steps.

    Attributes:
        operation, dtype, place: as in ``Collective``; together they are the kind.
        count: number of them.
        ms: time in which at least one of them is under way.
        exposed_ms: the part of it in which nothing is computed.
        bytes: bytes of their whole buffers; None where the trace does not tell.
        gbytes: ``bytes`` per second, in GB/s (10^9 bytes).
        bus_gbytes: the same times nccl-tests' factor: what a rank sends; None without group size.
    """

    operation: str
    dtype: str
    place: str
    count: float
    ms: float
    exposed_ms: float
    bytes: float | None
    gbytes: float | None
    bus_gbytes: float | None

    @property
    def name(self) -> str:
        """The kind in words."""
        return " ".join(word for word in (self.operation, self.dtype, self.place) if word)


@dataclass(frozen=True, slots=True)
class RankTimes:
    """A rank's step, as means over the steps of its trace.

    Attributes:
        file: name of the file.
        rank: its number, as the trace or the file's name tells.
        device: where the work was.
        steps: number of steps; 0 where the trace has no marks and is taken as one step.
        step_ms, compute_ms, communication_ms, exposed_ms, overlapped_ms, idle_ms: see the module.
        optimizer_ms: time in the optimizer; None where nothing marks it.
        kinds: the collectives, the longest first.
    """

    file: str
    rank: int
    device: Literal["cpu", "gpu"]
    steps: int
    step_ms: float
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    overlapped_ms: float
    idle_ms: float
    optimizer_ms: float | None
    kinds: tuple[KindTimes, ...]


def rank_times(trace: RankTrace, rank: int) -> RankTimes:
    """Measure a rank.

    Args:
        trace: its trace.
        rank: its number.
    """
    number = len(trace.steps)
    per_step = 1e-3 / number  # microseconds of all steps to milliseconds of one
    steps = union(interval for _, interval in trace.steps)
    compute = common(trace.compute, steps)
    traffic = common(union((c.start, c.stop) for c in trace.collectives), steps)
    overlapped = length(common(traffic, compute))
    whole, computed, travelled = length(steps), length(compute), length(traffic)
    optimizer = None if trace.optimizer is None else length(common(trace.optimizer, steps))
    return RankTimes(
        file=trace.path.name,
        rank=rank,
        device=trace.device,
        steps=0 if trace.steps[0][0] is None else number,
        step_ms=whole * per_step,
        compute_ms=computed * per_step,
        communication_ms=travelled * per_step,
        exposed_ms=(travelled - overlapped) * per_step,
        overlapped_ms=overlapped * per_step,
        idle_ms=max(0.0, whole - computed - travelled + overlapped) * per_step,
        optimizer_ms=None if optimizer is None else optimizer * per_step,
        kinds=_kinds(trace.collectives, steps, compute, number),
    )


def _kinds(
    collectives: Sequence[Collective], steps: Union, compute: Union, number: int
) -> tuple[KindTimes, ...]:
    alike: dict[tuple[str, str, str], list[Collective]] = defaultdict(list)
    for each in collectives:
        if common([(each.start, max(each.stop, each.start + 1e-9))], steps):
            alike[each.operation, each.dtype, each.place].append(each)
    times = [_kind(key, own, steps, compute, number) for key, own in alike.items()]
    return tuple(sorted(times, key=lambda kind: (-kind.ms, kind.name)))


def _kind(
    key: tuple[str, str, str],
    own: Sequence[Collective],
    steps: Union,
    compute: Union,
    number: int,
) -> KindTimes:
    under_way = common(union((each.start, each.stop) for each in own), steps)
    time = length(under_way)
    sizes = [each.bytes for each in own if each.bytes is not None]
    total = sum(sizes) if len(sizes) == len(own) else None
    factors = [bus_factor(each.operation, each.ranks) for each in own]
    sent = None
    if total is not None and None not in factors:
        sent = sum(s * f for s, f in zip(sizes, factors, strict=True) if f is not None)
    seconds = time * 1e-6
    return KindTimes(
        *key,
        count=len(own) / number,
        ms=time * 1e-3 / number,
        exposed_ms=(time - length(common(under_way, compute))) * 1e-3 / number,
        bytes=None if total is None else total / number,
        gbytes=total / seconds / 1e9 if total is not None and seconds else None,
        bus_gbytes=sent / seconds / 1e9 if sent is not None and seconds else None,
    )


@dataclass(frozen=True, slots=True)
class RunTimes:
    """A run: the ranks whose traces were given.

    Attributes:
        name: what the report calls it.
        ranks: in order of their numbers.
    """

    name: str
    ranks: tuple[RankTimes, ...]

    def mean(self, field: str) -> float | None:
        """Mean over the ranks of a field of ``RankTimes``; None where a rank has none."""
        values = [getattr(rank, field) for rank in self.ranks]
        return None if None in values else sum(values) / len(values)

    def imbalance(self, field: str) -> float | None:
        """The largest rank's value over the mean; None where the mean is 0 or missing."""
        mean = self.mean(field)
        return max(getattr(rank, field) for rank in self.ranks) / mean if mean else None

    @property
    def kinds(self) -> dict[str, KindTimes]:
        """The collectives by name, as means over all ranks."""
        alike: dict[str, list[KindTimes]] = defaultdict(list)
        for rank in self.ranks:
            for kind in rank.kinds:
                alike[kind.name].append(kind)
        times = {name: _over(own, len(self.ranks)) for name, own in alike.items()}
        return dict(sorted(times.items(), key=lambda item: (-item[1].ms, item[0])))


def _over(own: Sequence[KindTimes], ranks: int) -> KindTimes:
    first, time = own[0], sum(kind.ms for kind in own)
    sizes = [kind.bytes for kind in own]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    buses = [kind.bus_gbytes for kind in own]
    bus = None
    if None not in buses and time:
        bus = sum(k.bus_gbytes * k.ms for k in own if k.bus_gbytes is not None) / time
    return KindTimes(
        first.operation,
        first.dtype,
        first.place,
        count=sum(kind.count for kind in own) / ranks,
        ms=time / ranks,
        exposed_ms=sum(kind.exposed_ms for kind in own) / ranks,
        bytes=None if total is None else total / ranks,
        gbytes=total / time / 1e6 if total is not None and time else None,
        bus_gbytes=bus,
    )
