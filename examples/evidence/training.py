"""The quickstart's training as the runs of a study: resumable, each in one process."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
sys.path.insert(0, str(QUICKSTART))  # its scripts import each other by their bare names

from sweep import diverged as diverged  # noqa: E402
from sweep import run_all  # noqa: E402

NAMES = {"adam": "AdamW", "muon": "Muon"}


@dataclass(frozen=True)
class Study:
    """Where the single runs lie and how many run at a time; ``extra`` flags go to all
    of them.
    """

    work: Path
    jobs: int
    extra: tuple[str, ...] = ()

    def losses(
        self,
        optimizer: str,
        rates: tuple[float, ...],
        seeds: tuple[int, ...],
        flags: str,
    ) -> dict[float, list[dict[str, Any]]]:
        """The runs at each rate, one for each seed; a run that is in ``work`` is not
        repeated.
        """
        keys = [(optimizer, rate, seed) for rate in rates for seed in seeds]
        runs = run_all(keys, self.work, self.jobs, [*flags.split(), *self.extra])
        return {
            rate: [_kept(runs[optimizer, rate, seed]) for seed in seeds]
            for rate in rates
        }

    def searched(
        self,
        optimizer: str,
        rates: tuple[float, ...],
        seeds: tuple[int, ...],
        flags: str,
    ) -> dict[float, list[dict[str, Any]]]:
        """``losses``, with half or twice a rate as long as the best is the first or
        last one.
        """
        tried = self.losses(optimizer, rates, seeds, flags)
        while (rate := best(tried)) in (min(tried), max(tried)):
            further = rate / 2 if rate == min(tried) else 2 * rate
            tried |= self.losses(optimizer, (further,), seeds, flags)
        return dict(sorted(tried.items()))


def _kept(run: dict[str, Any]) -> dict[str, Any]:
    """What a figure needs of a run: curves with four decimals, training losses as
    means.
    """
    if run["val_loss"] is None:
        return {"loss": None}
    kept: dict[str, Any] = {
        "loss": round(run["val_loss"], 5),
        "corpus": run["corpus_sha256"],
    }
    ends = [int(step) for step, _ in run["validation"]]
    means = [
        [last, _mean([loss for step, loss in run["train"] if first < step <= last])]
        for first, last in pairwise(ends)
    ]
    kept["train"] = means
    for name in ("validation", "other"):
        if name in run:
            kept[name] = [[int(step), round(loss, 4)] for step, loss in run[name]]
    return kept


def _mean(losses: list[float]) -> float:
    return round(statistics.fmean(losses), 4)


def best(runs: dict[float, list[dict[str, Any]]]) -> float:
    """The rate with the lowest mean loss, among those at which no seed diverged."""
    means = {
        rate: statistics.fmean(run["loss"] for run in seeds)
        for rate, seeds in runs.items()
        if all(run["loss"] is not None for run in seeds)
    }
    if not means:
        raise ValueError(f"every rate of {sorted(runs)} diverged")
    return min(means, key=lambda rate: means[rate])


def write(path: Path, report: dict[str, Any]) -> None:
    """One line for each run, so that a change of one is seen in a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(report, indent=None, separators=(",", ":")).replace("]},", "]},\n")
    )
