"""The figures of ``megatron-muon bench step`` over all ranks: as a table, as JSON, by
part.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.lab.bench.step.measure import Measured
from megatron_muon.lab.bench.step.meter import (
    EXCHANGE,
    NEWTON_SCHULZ,
    PARAM_GATHER,
    Times,
)
from megatron_muon.lab.bench.step.rows import UPSTREAM
from megatron_muon.lab.tables import aligned

_OTHERS = ("adamw", *UPSTREAM)  # rows without a variant on auto
_AGAINST = ("adamw", "muon-contiguous", *UPSTREAM)
_AUTO = "-auto"  # suffix of our rows whose iteration is chosen by shape
_EXCHANGED = ("gather", "scatter", "tp_gather")
_HEADER = (
    "row",
    "step ms",
    "(min to max)",
    "exchange ms",
    "NS ms",
    "exchange MB",
    "all MB",
    "NS Gflop",
    "(all ranks)",
    "state MB",
    "peak MB",
)


@dataclass(frozen=True, slots=True)
class Line:
    """A row over all ranks, by its name; a round lasts until the slowest rank is
    done.
    """

    name: str
    ranks: tuple[Measured, ...]

    def steps_ms(self, without: str = "") -> list[float]:
        """Milliseconds of each round on the slowest rank, without its time in a
        part.
        """
        return [
            max(t.ms - t.parts_ms.get(without, 0.0) for t in times)
            for times in self._rounds()
        ]

    def parts_ms(
        self, *names: str, over_ranks: Callable[[list[float]], float] = max
    ) -> float:
        """Milliseconds of these parts, median over rounds; by default on the rank where
        they take longest.
        """

        def spent(times: Times) -> float:
            return sum(times.parts_ms.get(name, 0.0) for name in names)

        return statistics.median(
            over_ranks(list(map(spent, times))) for times in self._rounds()
        )

    def mean_parts_ms(self) -> dict[str, float]:
        """Milliseconds of each part, median over rounds of the mean over ranks."""
        every = itertools.chain(*self._rounds())
        names: set[str] = set().union(*(t.parts_ms for t in every))
        return {
            name: self.parts_ms(name, over_ranks=statistics.fmean) for name in names
        }

    def sent_bytes(self) -> dict[str, list[int]]:
        """Bytes that each rank sends, by kind."""
        every = [rank.counted.sent_bytes for rank in self.ranks]
        return {
            kind: [sent.get(kind, 0) for sent in every]
            for kind in sorted(set().union(*every))
        }

    def ns_flops(self) -> list[int]:
        return [rank.counted.flops for rank in self.ranks]

    def ns_cpu_ms_per_gflop(self) -> float | None:
        """Processor ms of Newton-Schulz per Gflop, over all ranks and rounds; None
        without any.
        """
        flops = sum(self.ns_flops()) * len(self.ranks[0].times)
        spent = sum(t.ns_cpu_ms for t in itertools.chain(*self._rounds()))
        return spent / flops * 1e9 if flops else None

    def _rounds(self) -> list[tuple[Times, ...]]:
        return list(zip(*(rank.times for rank in self.ranks), strict=True))


def as_json(
    lines: Sequence[Line], topology: dict[str, int], run: dict[str, Any]
) -> dict[str, Any]:
    """All figures for JSON: times in ms; lists of bytes and flops are by rank.

    ``rounds_ms`` has the slowest rank's step by round, ``rounds_ungathered_ms`` without
    the all-gather of parameters; other times are medians over rounds, on the rank with
    the longest. ``sent_bytes`` by kind: ``gather`` and ``scatter`` are our exchange,
    ``tp_gather`` is that of Megatron's own Muon, ``norm`` the gradient norm and votes;
    ``grad_reduce`` is before the step.
    ``ns_flops_once``: flops of all stages if each matrix is orthogonalized once.
    ``peak_bytes``: the peak in a step, minus the bytes before it.
    ``exchange_rounds``: of a step on the rank with most, dense and experts' together.
    """
    once = [sum(rank.ns_flops_once for rank in line.ranks) for line in lines]
    return {
        "topology": topology,
        "run": run,
        "rows": [
            {
                "name": line.name,
                "step_ms": {
                    "median": statistics.median(line.steps_ms()),
                    "min": min(line.steps_ms()),
                    "max": max(line.steps_ms()),
                },
                "exchange_ms": line.parts_ms(*EXCHANGE),
                "newton_schulz_ms": line.parts_ms(NEWTON_SCHULZ),
                "sent_bytes": line.sent_bytes(),
                "ns_flops": line.ns_flops(),
                "ns_flops_once": max(once, default=0),
                "state_bytes": [rank.state_bytes for rank in line.ranks],
                "peak_bytes": [rank.peak_bytes for rank in line.ranks],
                "rounds_ms": line.steps_ms(),
                "newton_schulz_cpu_ms_per_gflop": line.ns_cpu_ms_per_gflop(),
                "rounds_ungathered_ms": line.steps_ms(PARAM_GATHER),
                "exchange_rounds": max(rank.exchange_rounds for rank in line.ranks),
            }
            for line in lines
        ],
    }


def as_text(lines: Sequence[Line]) -> str:
    """The table, then the ratios of each row to others.

    If our rows on ``auto`` are there, a second block has them in place of our others.
    """
    text = [*aligned([_HEADER, *(_cells(line) for line in lines)]), ""]
    equal = [line for line in lines if not line.name.endswith(_AUTO)]
    text += _block(
        "step time to others', the same Newton-Schulz iteration in all rows:", equal
    )
    if len(equal) < len(lines):
        faster = [
            line for line in lines if line.name.endswith(_AUTO) or line.name in _OTHERS
        ]
        ratios = _block("step time to others', ours on auto:", faster)
        text += ["", *ratios] if ratios else []
    return "\n".join(text)


def _cells(line: Line) -> tuple[str, ...]:
    steps = line.steps_ms()
    sent = line.sent_bytes()
    flops = line.ns_flops()
    exchanged = [sent[kind] for kind in _EXCHANGED if kind in sent]
    return (
        line.name,
        f"{statistics.median(steps):.1f}",
        f"({min(steps):.1f} to {max(steps):.1f})",
        f"{line.parts_ms(*EXCHANGE):.1f}",
        f"{line.parts_ms(NEWTON_SCHULZ):.1f}",
        _mb(_busiest(exchanged)),
        _mb(_busiest(list(sent.values()))),
        f"{max(flops) / 1e9:.2f}",
        f"({sum(flops) / 1e9:.2f})",
        _mb(max(rank.state_bytes for rank in line.ranks)),
        _mb(max(rank.peak_bytes for rank in line.ranks)),
    )


def _busiest(kinds: Sequence[Sequence[int]]) -> int:
    return max((sum(rank) for rank in zip(*kinds, strict=True)), default=0)


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f}"


def _block(title: str, lines: Sequence[Line]) -> list[str]:
    """Ratios under a title; ratios to upstream's row also without the gather of
    parameters.
    """
    names = {line.name for line in lines}
    against = [name + _AUTO if name + _AUTO in names else name for name in _AGAINST]
    ratios = _ratios_to(lines, against, Line.steps_ms)
    if not ratios:
        return []
    ungathered = _ratios_to(lines, UPSTREAM, lambda line: line.steps_ms(PARAM_GATHER))
    if ungathered:
        ungathered.insert(0, " without the gather of parameters in either:")
    return [title, *ratios, *ungathered]


def _ratios_to(
    lines: Sequence[Line],
    against: Sequence[str],
    steps_of: Callable[[Line], list[float]],
) -> list[str]:
    """A table: median and range of the rounds' ratios to each of ``against``."""
    by_name = {line.name: steps_of(line) for line in lines}
    against = [other for other in against if other in by_name]
    rows = []
    for name, steps in by_name.items():
        cells = [
            "" if other == name else _ratio(steps, by_name[other]) for other in against
        ]
        rows += [[name, *cells]] if any(cells) else []
    return (
        aligned([["row", *(f"to {other}" for other in against)], *rows]) if rows else []
    )


def _ratio(steps: Sequence[float], others: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(steps, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def parts_text(lines: Sequence[Line]) -> str:
    """Parts of each row's step: ms as the mean over ranks, and share of the sum."""
    text = []
    for line in lines:
        parts = line.mean_parts_ms()
        total = sum(parts.values()) or 1.0
        text.append(f"{line.name}: parts of the step, mean over ranks")
        for name, ms in sorted(parts.items(), key=lambda part: -part[1]):
            text.append(f"  {name:36} {ms:9.1f} ms {ms / total:6.1%}")
    return "\n".join(text)
