"""The bandwidth at which Muon's advantage in time ends: from measured steps, and by a model.

Muon that leads by ``lead`` needs 1 / (1 + lead) as many steps for a loss. So it is ahead in time
where its step takes less than 1 + lead times AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_muon.lab.compare.figures import Figures

LEADS = (0.1, 0.5, 1.0)  # leading ratios that the bandwidth is asked for


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps of both optimizers at a rate.

    Attributes:
        mbits: of a rank's link, 10^6 bits per second; infinity where nothing slows it.
        adamw_ms, muon_ms: of a step.
    """

    mbits: float
    adamw_ms: float
    muon_ms: float

    def behind(self, lead: float) -> float:
        """Milliseconds by which Muon is behind AdamW, a step of AdamW's; negative: ahead."""
        return self.muon_ms - (1 + lead) * self.adamw_ms


@dataclass(frozen=True, slots=True)
class Change:
    """A bandwidth at which Muon's advantage ends or begins.

    Attributes:
        mbits: where both need the same time.
        ends: Muon is ahead above it; else below it.
        between: the rates on either side that were measured, the slower first; None by the model.
    """

    mbits: float
    ends: bool
    between: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Advantage:
    """Where Muon is ahead in time to a loss.

    Attributes:
        lead: the leading ratio that is assumed.
        ahead: Muon is ahead where nothing slows the ranks.
        changes: from fast links to slow ones; empty where the answer is the same at every rate.
    """

    lead: float
    ahead: bool
    changes: tuple[Change, ...]


def modelled(adamw: Figures, muon: Figures, ranks: int, mbits: float) -> Timed:
    """Steps at a rate: as measured without it, plus bytes over the bandwidth, nothing overlapped.

    Bytes are those of a mean rank, of gradients, parameters and the exchange. Those of tensor and
    pipeline parallelism are not counted.
    """
    times = [
        one.step_ms + 8e-3 * (one.megatrons + one.exchange) / ranks / mbits for one in (adamw, muon)
    ]
    return Timed(mbits, times[0], times[1])


def by_model(adamw: Figures, muon: Figures, ranks: int, lead: float) -> Advantage:
    """``modelled`` at every rate: it is a straight line over 1 / rate."""
    start = modelled(adamw, muon, ranks, math.inf).behind(lead)
    slope = modelled(adamw, muon, ranks, 1.0).behind(lead) - start
    ahead = start < 0 or (start == 0 and slope < 0)
    if not start or not slope or (slope < 0) == ahead:
        return Advantage(lead, ahead, ())
    return Advantage(lead, ahead, (Change(abs(slope / start), ends=ahead),))


def measured(points: Sequence[Timed], lead: float) -> Advantage:
    """Changes between neighbouring rates; times between two are a straight line over 1 / rate.

    Args:
        points: at least one; any order.
        lead: the leading ratio that is assumed.
    """
    ordered = sorted(points, key=lambda each: -each.mbits)
    changes = tuple(
        _change(fast, slow, lead)
        for fast, slow in pairwise(ordered)
        if (fast.behind(lead) < 0) != (slow.behind(lead) < 0)
    )
    return Advantage(lead, ordered[0].behind(lead) < 0, changes)


def _change(fast: Timed, slow: Timed, lead: float) -> Change:
    before, after = fast.behind(lead), slow.behind(lead)
    part = before / (before - after)
    inverse = (1 - part) / fast.mbits + part / slow.mbits
    mbits = 1 / inverse if inverse else math.inf
    return Change(mbits, ends=before < 0, between=(slow.mbits, fast.mbits))
