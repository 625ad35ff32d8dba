"""Each kind of loss that all runs have, beside the first run's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.lab.curves.curve import KINDS, Curve, CurveError, Kind
from megatron_muon.lab.curves.lead import (
    USUAL_WINDOW,
    Lead,
    Need,
    envelope,
    hangs_on_window,
    leads,
    needs,
    smooth,
    smoothing_decides,
)
from megatron_muon.lab.curves.runs import Run


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a run's curves end.

    Attributes:
        name: the run's name.
        steps: the last step that all of its seeds have.
        losses: the last loss of each seed, of the smoothed and monotone curve.
        dropped: losses of its files that were not finite.
    """

    name: str
    steps: float
    losses: tuple[float, ...]
    dropped: int


@dataclass(frozen=True, slots=True)
class Beside:
    """A run beside the first one.

    Attributes:
        name: the run's name.
        leads: the leading ratio over training.
        needs: the first run's steps for this one's losses.
        by_window: the last leading ratio under several windows.
    """

    name: str
    leads: tuple[Lead, ...]
    needs: tuple[Need, ...]
    by_window: tuple[float | None, ...]

    @property
    def hangs_on_window(self) -> bool:
        """Whether the window decides the last ratio."""
        return hangs_on_window(self.by_window)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One kind of loss.

    Attributes:
        kind: which loss.
        window: part of a curve's points in a block.
        endings: of each run; the first one is the baseline.
        others: each other run beside the baseline.
    """

    kind: Kind
    window: float
    endings: tuple[Ending, ...]
    others: tuple[Beside, ...]


def compare(runs: Sequence[Run], window: float | None) -> list[Comparison]:
    """Compare runs with the first one.

    Args:
        runs: two or more.
        window: part of a curve's points in a block; None for ``USUAL_WINDOW`` of training curves,
            and single points of others.

    Raises:
        CurveError: no kind of loss is in all files.
    """
    comparisons = []
    for kind in KINDS:
        curves = [run.curves(kind) for run in runs]
        present = [each for each in curves if each is not None]
        if len(present) == len(runs):
            usual = USUAL_WINDOW if kind == "train" else 0.0
            comparisons.append(_compare(kind, runs, present, usual if window is None else window))
    if not comparisons:
        have = "; ".join(
            f"{run.name}: {', '.join(sorted(set().union(*map(set, run.seeds))))}" for run in runs
        )
        raise CurveError(f"no kind of loss is in all files ({have})")
    return comparisons


def _compare(
    kind: Kind, runs: Sequence[Run], curves: Sequence[Sequence[Curve]], window: float
) -> Comparison:
    baseline = curves[0]
    endings = [_ending(run.name, own, window) for run, own in zip(runs, curves, strict=True)]
    others = [
        Beside(
            run.name,
            tuple(leads(baseline, own, window)),
            tuple(needs(baseline, own, window)),
            tuple(smoothing_decides(baseline, own)),
        )
        for run, own in zip(runs[1:], curves[1:], strict=True)
    ]
    return Comparison(kind, window, tuple(endings), tuple(others))


def _ending(name: str, curves: Sequence[Curve], window: float) -> Ending:
    losses = tuple(envelope(smooth(each.points, window))[-1][1] for each in curves)
    dropped = sum(each.dropped for each in curves)
    return Ending(name, min(each.last_step for each in curves), losses, dropped)
